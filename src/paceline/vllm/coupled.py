"""Coupled sampling in vLLM: a sampled token is argmax(log p + G) with our noise, with and without speculation.

It takes the place of `GPUModelRunner._sample` (`replacements.py`). vLLM still applies penalties, grammars, bad words and biases
to the logits; temperature, truncation and the choice of a token are ours. A draft token is accepted if it is the token that
vLLM would have sampled without the draft, so that the text with a seed is the same with speculation on and off.

`pick` picks tokens of many rows with our noise, and `accept` finds the accepted part of drafts, on the device of the logits.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import proxy

import torch
from torch import Tensor

from paceline.core.errors import InvalidConfig
from paceline.core.request import SamplingParams
from paceline.speculation.distribution import pick as pick_on_host
from paceline.speculation.rows import Purpose, RowContext, stream
from paceline.vllm.sequences import RowSampling

PLACEHOLDER = -1
"""vLLM's mark for a rejected token."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """Parameters, seeds and positions of the tokens to choose, one per row."""

    params: Sequence[SamplingParams]
    seeds: Sequence[int]
    positions: Tensor  # [R] int64, on the device of the logits


def pick(logits: Tensor, rows: SamplingRows) -> Tensor:
    """[R] int64: argmax(log p + G). Greedy rows take the arg-max."""
    if logits.device.type != "cuda":
        return pick_on_host(
            logits,
            [
                RowContext(params, seed, 0, position, (), 0)
                for params, seed, position in zip(rows.params, rows.seeds, rows.positions.tolist(), strict=True)
            ],
        )
    from paceline.kernels.gpu.speculation.pick import pick as pick_sampled
    from paceline.kernels.gpu.speculation.pick_truncated import pick_truncated

    device = logits.device

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    temperature = column([params.temperature for params in rows.params], torch.float32)
    streams = column([_signed(stream(Purpose.SHARED, seed, 0)) for seed in rows.seeds], torch.int64)
    positions = rows.positions.to(torch.int64)
    if not any(params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 for params in rows.params):
        return pick_sampled(logits, temperature, streams, positions)
    return pick_truncated(
        logits,
        temperature,
        streams,
        positions,
        column([params.top_k for params in rows.params], torch.int64),
        column([params.top_p for params in rows.params], torch.float64),
        column([params.min_p for params in rows.params], torch.float32),
    )


def accept(drafts: Tensor, picks: Tensor, bonus: Tensor, counts: Sequence[int]) -> Tensor:
    """[B, S + 1] int32: the accepted drafts of each sequence and the target's token after them, then placeholders.

    `drafts` and `picks` [N] are those of all sequences in order, `counts[i]` of sequence i. `bonus` [B] follows a draft that is
    accepted whole. S is the largest count.
    """
    device, size, longest = drafts.device, len(counts), max(counts)
    if longest == 0:
        return bonus.to(torch.int32).unsqueeze(1)
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    last = max(starts[-1] - 1, 0)
    index = torch.tensor([[min(start + j, last) for j in range(longest)] for start in starts[:-1]]).to(device)
    given = torch.tensor(counts).to(device)
    columns = torch.arange(longest, device=device)
    own, wanted = drafts[index].to(torch.int64), picks[index]  # [B, S]
    is_accepted = ((own == wanted) & (columns < given.unsqueeze(1))).cumprod(1).to(torch.bool)
    num_accepted = is_accepted.sum(1, keepdim=True)  # [B, 1]
    tokens = torch.full((size, longest + 1), PLACEHOLDER, dtype=torch.int64, device=device)
    tokens[:, :longest] = torch.where(is_accepted, own, PLACEHOLDER)
    recovered = wanted.gather(1, num_accepted.clamp(max=longest - 1))
    after = torch.where(num_accepted == given.unsqueeze(1), bonus.to(torch.int64).unsqueeze(1), recovered)
    return tokens.scatter_(1, num_accepted, after).to(torch.int32)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


MIN_TEMPERATURE = 1e-5
"""Temperature under which vLLM decodes greedily."""


@dataclass(frozen=True, slots=True)
class _Request:
    params: SamplingParams
    seed: int


class CoupledSampling:
    """The sampling of one model runner."""

    def __init__(self, runner: Any) -> None:
        if runner.sampler.logprobs_mode not in ("raw_logprobs", "raw_logits"):
            raise InvalidConfig(
                f"coupled sampling reports raw log-probabilities, and logprobs_mode is {runner.sampler.logprobs_mode}: "
                "remove --logprobs-mode, or unset PACELINE_COUPLED_SAMPLING"
            )
        self._runner = proxy(runner)
        self._requests: dict[str, _Request] = {}
        self._rows: SamplingRows | None = None
        sampler = runner.sampler
        self._plain_sample = sampler.sample
        sampler.sample = self._choose  # of this instance; vLLM's warm-up calls it without rows

    def sample(self, logits: Tensor, drafts: Any) -> Any:
        """vLLM's `SamplerOutput` of a step. `drafts` is its metadata of the draft tokens, or None."""
        runner = self._runner
        batch = runner.input_batch
        batch.update_async_output_token_ids()
        requests = self._read_requests(batch.req_ids)
        drafter: Any = getattr(runner, "drafter", None)
        if getattr(drafter, "wants_sampling", False):
            drafter.set_sampling([RowSampling(request.params, request.seed) for request in requests])
        if drafts is None:
            last = runner.query_start_loc.gpu[1 : len(requests) + 1] - 1
            rows = self._pick_rows(requests, runner.positions[last] + 1)
            return self._with_rows(rows, logits, batch.sampling_metadata)
        if runner.use_async_scheduling and runner._draft_token_req_ids is not None:
            tokens, _ = runner._get_draft_token_ids_cpu()
            batch.update_async_spec_token_ids(tokens)
        return self._verify(logits, drafts, requests, batch.sampling_metadata)

    def _verify(self, logits: Tensor, drafts: Any, requests: Sequence[_Request], metadata: Any) -> Any:
        from vllm.v1.outputs import SamplerOutput

        verifier = self._runner.rejection_sampler
        positions = self._runner.positions[drafts.logits_indices] + 1  # [num drafts + num requests]
        bonus = self._with_rows(
            self._pick_rows(requests, positions[drafts.bonus_logits_indices]),
            logits[drafts.bonus_logits_indices],
            replace(metadata, max_num_logprobs=-1),
            predict_bonus_token=True,
            logprobs_mode_override="raw_logits",
        )
        raw = logits[drafts.target_logits_indices].to(torch.float32)
        scores = verifier.apply_logits_processors(raw.clone(), metadata, drafts)
        counts = drafts.num_draft_tokens
        repeated = [request for request, count in zip(requests, counts, strict=True) for _ in range(count)]
        picks = pick(scores, self._pick_rows(repeated, positions[drafts.target_logits_indices]))
        tokens = accept(drafts.draft_token_ids, picks, bonus.sampled_token_ids.squeeze(1), counts)
        logprobs = None
        if metadata.max_num_logprobs is not None:
            logprobs = verifier._get_logprobs_tensors(
                metadata.max_num_logprobs, drafts, logits, raw, bonus.logprobs_tensors.logprobs, tokens
            )
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)

    def _with_rows(self, rows: SamplingRows, logits: Tensor, metadata: Any, **options: Any) -> Any:
        self._rows = rows
        try:
            return self._runner.sampler(logits=logits, sampling_metadata=metadata, **options)
        finally:
            self._rows = None

    def _choose(self, logits: Tensor, metadata: Any, *args: Any, **options: Any) -> Any:
        """The step of vLLM's sampler after all changes of the logits: (tokens, None)."""
        if self._rows is None:
            return self._plain_sample(logits, metadata, *args, **options)
        return pick(logits, self._rows), None

    def _pick_rows(self, requests: Sequence[_Request], positions: Tensor) -> SamplingRows:
        return SamplingRows([request.params for request in requests], [request.seed for request in requests], positions)

    def _read_requests(self, req_ids: Sequence[str]) -> list[_Request]:
        known = self._requests
        if any(name not in known for name in req_ids):
            self._requests = {name: known.get(name) or _read(self._runner.requests[name]) for name in req_ids} | {
                name: request for name, request in known.items() if name in self._runner.requests
            }
        return [self._requests[name] for name in req_ids]


def _read(request: Any) -> _Request:
    """Parameters of a request of vLLM. Without a seed it gets a random seed. vLLM gives each of `n` choices its own seed."""
    given = request.sampling_params
    is_greedy = given.temperature < MIN_TEMPERATURE
    params = SamplingParams(
        temperature=0.0 if is_greedy else min(given.temperature, 10.0),
        top_k=max(0, given.top_k),
        top_p=given.top_p,
        min_p=given.min_p,
    )
    return _Request(params, secrets.randbits(63) if given.seed is None else given.seed % 2**63)
