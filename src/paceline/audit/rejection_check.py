"""Checks of rejection text: the p and q that verification used, and the distribution of the tokens."""

import random
from collections.abc import Mapping
from dataclasses import replace

from paceline.audit.divergence import divergence, is_sample, limit
from paceline.audit.report import AuditedText, Finding
from paceline.audit.two_sample import rank
from paceline.audit.verify_log import LoggedToken
from paceline.core.errors import PacelineError
from paceline.models.runner import ModelRunner
from paceline.speculation.verification.distribution import log_distribution
from paceline.speculation.verification.rescoring import Rescored, computed_in, rounding


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
    dtype = computed_in(runner)
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
