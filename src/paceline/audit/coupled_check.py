"""Checks of coupled and greedy text: seed and target determine every token, so every token is replayed."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest

import torch

from paceline.audit.divergence import divergence, limit
from paceline.audit.report import AuditedText, Finding, Kind
from paceline.audit.verify_log import LoggedToken
from paceline.core.output import CompletionOutput
from paceline.models.runner import ModelRunner
from paceline.speculation.verification.distribution import log_distribution
from paceline.speculation.verification.noise import Purpose, gumbel
from paceline.speculation.verification.processors import process
from paceline.speculation.verification.rescoring import Difference, Rescored, computed_in, differences, rounding


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
    found, most = [], 0.0
    for i, row in enumerate(rescored.rows):
        entry = entries.get(i)
        if entry is not None:
            if row.params.is_greedy:
                row = replace(row, params=replace(row.params, temperature=1.0))
            tolerance = rounding(rescored.logits[i], computed_in(runner))
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
