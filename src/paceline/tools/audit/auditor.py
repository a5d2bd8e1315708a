"""Generates with and without speculation, and checks every token.

Seed and target determine every token of coupled and greedy text, so `check_coupled` replays every token. `check_rejection`
checks the p and q that verification used, and the distribution of the tokens.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch

from paceline.core.errors import InvalidRequest, PacelineError
from paceline.core.output import CompletionOutput, Generation
from paceline.core.request import SamplingParams, Verification
from paceline.engine.audit import (
    Difference,
    FinishedText,
    Rescored,
    Rescoring,
    computed_in,
    differences,
    rounding,
)
from paceline.engine.start import LLM, Prompt
from paceline.kernels.cpu import native
from paceline.kv import blocks_for
from paceline.models import make_second_runner
from paceline.models.decoder import DecoderModel
from paceline.models.runner import ModelRunner
from paceline.speculation.distribution import log_distribution
from paceline.speculation.rows import Purpose, gumbel, process
from paceline.tools.audit.report import AuditedText, Finding, Kind
from paceline.tools.audit.tests import LoggedToken, VerifyLog, divergence, is_sample, limit, rank


def check_coupled(
    found: AuditedText,
    rescored: Rescored,
    entries: Mapping[int, LoggedToken],
    speculative: CompletionOutput,
    plain: CompletionOutput,
    runner: ModelRunner,
) -> AuditedText:
    """Check one text. `rescored` is the speculative text and `entries` its verify log. `plain` was generated with the same
    seed, without speculation."""
    wrong = differences(rescored, computed_in(runner))
    findings = [_finding("token", found, difference) for difference in wrong if not difference.is_rounding]
    num_rounding = sum(difference.is_rounding for difference in wrong)
    first = _first_difference(rescored, speculative, plain, runner)
    if first is not None and not first.is_rounding:
        findings.append(_finding("text", found, first))
    divergences, most = _divergences(rescored, entries, runner)
    findings.extend(
        Finding("logits", found.prompt, i, found.origins[i], rescored.tokens[i], None, kl)
        for i, kl in divergences
        if kl > most
    )
    return replace(
        found,
        findings=tuple(findings),
        p_divergence=divergences,
        most_divergence=most,
        num_rounding=max(num_rounding, int(first is not None and first.is_rounding)),
        margins=_margins(rescored),
    )


def _finding(kind: Kind, found: AuditedText, difference: Difference) -> Finding:
    origin = found.origins[difference.index] if difference.index < len(found.origins) else "ended"
    return Finding(kind, found.prompt, difference.index, origin, difference.token, difference.pick, difference.gap)


def _first_difference(
    rescored: Rescored, speculative: CompletionOutput, plain: CompletionOutput, runner: ModelRunner
) -> Difference | None:
    """The first token at which the two texts differ. Later tokens are not comparable."""
    pairs = zip_longest(speculative.token_ids, plain.token_ids, fillvalue=-1)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if index is None:
        if (speculative.text, speculative.finish_reason) == (plain.text, plain.finish_reason):
            return None
        return Difference(len(plain.token_ids), -1, -1, torch.inf, is_rounding=False)
    # The longer text continues where the shorter text ended.
    if index >= min(len(speculative.token_ids), len(plain.token_ids)):
        token, other = (*speculative.token_ids, -1)[index], (*plain.token_ids, -1)[index]
        return Difference(index, token, other, torch.inf, is_rounding=False)
    a, b = speculative.token_ids[index], plain.token_ids[index]
    # The texts are equal before this token, so one row of logits is checked against the two tokens.
    row = Rescored(index, (a,), rescored.logits[index : index + 1], rescored.rows[index : index + 1])
    checked = [
        difference for token in (a, b) for difference in differences(replace(row, tokens=(token,)), computed_in(runner))
    ]
    worst = max(checked, key=lambda difference: difference.gap)
    return replace(worst, token=a, pick=b, is_rounding=all(difference.is_rounding for difference in checked))


def _divergences(
    rescored: Rescored, entries: Mapping[int, LoggedToken], runner: ModelRunner
) -> tuple[tuple[tuple[int, float], ...], float]:
    """(output token, KL of the distribution of the used logits from that of a plain pass), and the largest KL that rounding
    explains. Greedy rows are compared at temperature 1."""
    # Logarithms of distributions are rounded, also where the logits are equal
    dtype = computed_in(runner) or torch.float32
    found, most = [], 0.0
    for i, row in enumerate(rescored.rows):
        entry = entries.get(i)
        if entry is not None:
            if row.params.is_greedy:
                row = replace(row, params=replace(row.params, temperature=1.0))
            tolerance = rounding(rescored.logits[i], dtype)
            used = log_distribution(entry.logits.unsqueeze(0), [row])[0].exp()
            found.append((i, divergence(used, rescored.logits[i], row, tolerance)))
            most = max(most, limit(tolerance, row.params.temperature))
    return tuple(found), most


def _margins(rescored: Rescored) -> tuple[float, ...]:
    rows = rescored.rows
    if rows[0].params.is_greedy:
        scores, unit = process(rescored.logits, rows), 1.0
    else:
        noise = gumbel([row.key for row in rows], Purpose.SHARED, rescored.logits.shape[1], rescored.logits.device)
        scores, unit = noise.add_(log_distribution(rescored.logits, rows)), rows[0].params.temperature
    best = scores.topk(2, dim=1).values
    return tuple(((best[:, 0] - best[:, 1]) * unit).tolist())


def check_rejection(
    found: AuditedText,
    rescored: Rescored,
    entries: Mapping[int, LoggedToken],
    draft: Rescored | None,
    plain: Rescored,
    runner: ModelRunner,
    rng: random.Random,
) -> AuditedText:
    """Check one text. `entries` is its verify log, `draft` the same text rescored by the draft, `plain` another text for the
    prompt, generated without speculation."""
    findings: list[Finding] = []
    p_divergence, q_divergence, num_samples, largest = [], [], 0, 0.0
    dtype = computed_in(runner) or torch.float32
    for i, (token, row) in enumerate(zip(rescored.tokens, rescored.rows, strict=True)):
        entry = entries.get(i)
        if entry is None or entry.p is None:
            raise PacelineError(f"the verify log has no entry for output token {i} of prompt {found.prompt}")
        tolerance = rounding(rescored.logits[i], dtype)
        most = limit(tolerance, row.params.temperature)
        largest = max(largest, most)
        place = found.prompt, i, found.origins[i]
        p = divergence(entry.p, rescored.logits[i], row, tolerance)
        p_divergence.append((i, p))
        if p > most:
            findings.append(Finding("p", *place, token, None, p))
        if entry.q is None or entry.drafted is None or draft is None:
            continue
        q = divergence(entry.q, draft.logits[i], row, tolerance)
        q_divergence.append((i, q))
        if q > most:
            findings.append(Finding("q", *place, entry.drafted, None, q))
        num_samples += 1
        if not is_sample(entry.q, entry.drafted, row):
            findings.append(Finding("sample", *place, entry.drafted, None, float(entry.q[entry.drafted])))
    return replace(
        found,
        findings=tuple(findings),
        p_divergence=tuple(p_divergence),
        q_divergence=tuple(q_divergence),
        most_divergence=largest,
        num_samples=num_samples,
        ranks=_ranks(rescored, rng),
        plain_ranks=_ranks(plain, rng),
    )


def _ranks(rescored: Rescored, rng: random.Random) -> tuple[float, ...]:
    probs = log_distribution(rescored.logits, rescored.rows).double().exp()
    return tuple(rank(row, token, rng) for row, token in zip(probs, rescored.tokens, strict=True))


ROWS = 64
"""Tokens per rescoring pass."""
LOG_BYTES = 2**31
"""Memory for the verify log of one batch: longer texts are audited in smaller batches."""
OTHER_SEEDS = 2**40
"""Offset of the seeds of plain texts where the two samples must be independent."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts of an audit and how they are sampled and verified."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    """Sampling parameters. The seed is that of the first prompt, and every next prompt has the next seed."""
    verification: Verification
    method: str | None = None
    """Drafting method. None leaves the choice to the engine."""
    concurrency: int = 8

    @property
    def is_coupled(self) -> bool:
        """Whether the text is a function of the seed. Greedy text is, under each rule."""
        return self.verification == "coupled" or self.sampling.is_greedy


class Auditor:
    """Audits an idle engine. Texts are rescored in a separate KV cache."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._runner = llm, llm.engine.runner
        self._runners: dict[int, ModelRunner] = {}  # by id of the model

    def run(self, workload: Workload, progress: Callable[[int], None] = lambda done: None) -> list[AuditedText]:
        """The audited texts in the order of the prompts. `progress` receives the number of prompts just done."""
        audited: list[AuditedText] = []
        # Up to three float32 rows of the vocabulary per token: logits, p and q.
        text_bytes = 12 * workload.sampling.max_tokens * self._runner.model.config.vocab_size
        batch_size = max(1, min(workload.concurrency, LOG_BYTES // text_bytes))
        try:
            for start in range(0, len(workload.prompts), batch_size):
                group = range(start, min(start + batch_size, len(workload.prompts)))
                audited.extend(self._audit(workload, group))
                progress(len(group))
        finally:
            for runner in self._runners.values():
                runner.close()
            self._runners.clear()
        return audited

    def _audit(self, workload: Workload, group: range) -> list[AuditedText]:
        log = VerifyLog()
        with self._llm.engine.hooks.listening(log):
            speculative = self._generate(workload, group, enabled=True)
        plain = self._generate(workload, group, enabled=False)
        with native.single_threaded_torch(), torch.inference_mode():
            return [
                self._check(workload, prompt, speculated, plain_run, log)
                for prompt, speculated, plain_run in zip(group, speculative, plain, strict=True)
            ]

    def _generate(self, workload: Workload, group: range, enabled: bool) -> list[Generation]:
        offset = 0 if enabled or workload.is_coupled else OTHER_SEEDS
        speculation: dict[str, Any] = {"enabled": enabled, "verification": workload.verification}
        if workload.method is not None:
            speculation["method"] = workload.method
        return self._llm.generate(
            [workload.prompts[i] for i in group],
            [replace(workload.sampling, seed=(workload.sampling.seed or 0) + i + offset) for i in group],
            speculation=speculation,
            # Different salts: the two runs must not share the prefix cache.
            cache_salt="audit/speculative" if enabled else "audit/plain",
        )

    def _check(
        self, workload: Workload, prompt: int, speculated: Generation, plain_run: Generation, log: VerifyLog
    ) -> AuditedText:
        completion, plain = speculated.completions[0], plain_run.completions[0]
        seed = (workload.sampling.seed or 0) + prompt
        text = _finished(workload.sampling, speculated, completion, seed)
        rescored = self._rescore(self._runner.model, text)
        origins = tuple(origin.value for origin in completion.origins)
        found = AuditedText(
            prompt,
            origins,
            completion.speculation.num_draft_tokens,
            completion.speculation.num_accepted_draft_tokens,
            findings=(),
        )
        entries = log.take(speculated.request_id, 0)
        if workload.is_coupled:
            return check_coupled(found, rescored, entries, completion, plain, self._runner)
        plain_rescored = self._rescore(
            self._runner.model, _finished(workload.sampling, plain_run, plain, seed + OTHER_SEEDS)
        )
        draft = self._draft(workload.method or self._llm.snapshot().flags.method or "")
        return check_rejection(
            found,
            rescored,
            entries,
            None if draft is None else _padded(self._rescore(draft, text), rescored.logits.shape[1]),
            plain_rescored,
            self._runner,
            random.Random(prompt),
        )

    def _rescore(self, model: DecoderModel, text: FinishedText) -> Rescored:
        """Logits of all output tokens of a text, from plain passes."""
        needed = blocks_for(len(text.ids))
        runner = self._runners.get(id(model))
        if runner is None or runner.num_blocks < needed:
            cache = self._runner.cache[0][0].dtype
            if runner is not None:
                runner.close()
            runner = make_second_runner(self._runner, model, needed, None if cache == model.dtype else cache)
            self._runners[id(model)] = runner
        rescoring, parts = Rescoring(text, runner, range(needed)), []
        while not rescoring.is_done:
            parts.append(rescoring.advance(ROWS))
        parts = [part for part in parts if part.tokens]
        return Rescored(
            0,
            tuple(token for part in parts for token in part.tokens),
            torch.cat([part.logits for part in parts]),
            tuple(row for part in parts for row in part.rows),
        )

    def _draft(self, method: str) -> DecoderModel | None:
        """The model whose q `method` samples from. None for methods without one, and for one-hot q."""
        proposer = self._llm.engine.speculator.proposers.get(method)
        return proposer.traits.q_model if proposer is not None else None


def _padded(rescored: Rescored, vocab_size: int) -> Rescored:
    """Fit a draft's logits to the target's vocabulary: missing tokens are impossible, extra ones are dropped."""
    logits = rescored.logits[:, :vocab_size]
    missing = vocab_size - logits.shape[1]
    padded = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
    return replace(rescored, logits=padded)


def _finished(
    sampling: SamplingParams, generation: Generation, completion: CompletionOutput, seed: int
) -> FinishedText:
    if sampling.constraint is not None:
        raise InvalidRequest("an audit does not support JSON schemas and grammars", field="json_schema")
    return FinishedText(generation.prompt_token_ids, completion.token_ids, sampling, seed)
