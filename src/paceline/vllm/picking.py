"""Picks of many rows with our noise, and the accepted part of drafts, on the device of the logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.sampling import SamplingParams
from paceline.speculation.verification.distribution import pick as pick_on_host
from paceline.speculation.verification.noise import Purpose, stream
from paceline.speculation.verification.rows import RowContext

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
    from paceline.kernels.gpu.speculation import pick as kernels

    device = logits.device

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    temperature = column([params.temperature for params in rows.params], torch.float32)
    streams = column([_signed(stream(Purpose.SHARED, seed, 0)) for seed in rows.seeds], torch.int64)
    positions = rows.positions.to(torch.int64)
    if not any(params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 for params in rows.params):
        return kernels.pick(logits, temperature, streams, positions)
    return kernels.pick_truncated(
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
