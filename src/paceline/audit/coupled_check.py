"""Coupled and greedy text: a function of seed and target alone, so every token can be proved."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest

import torch

from paceline.audit.divergence import divergence, limit
from paceline.audit.findings import AuditedText, Finding, Kind
from paceline.audit.verify_log import Entry
from paceline.core.output import Completion
from paceline.models.runner import ModelRunner
from paceline.speculation.verification.distribution import log_distribution
from paceline.speculation.verification.noise import Purpose, gumbel
from paceline.speculation.verification.processors import process
from paceline.speculation.verification.rescoring import Difference, Rescored, computed_in, differences, rounding


def check_coupled(
    found: AuditedText,
    rescored: Rescored,
    entries: Mapping[int, Entry],
    speculative: Completion,
    plain: Completion,
    runner: ModelRunner,
) -> AuditedText:
    """`rescored` is the speculative text, `entries` what it was judged by; `plain` was generated with the same seed and without
    speculation."""
    parted = differences(rescored, computed_in(runner))
    findings = [_finding("token", found, one) for one in parted if not one.is_rounding]
    num_rounding = sum(one.is_rounding for one in parted)
    apart = _first_apart(rescored, speculative, plain, runner)
    if apart is not None and not apart.is_rounding:
        findings.append(_finding("text", found, apart))
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
        num_rounding=max(num_rounding, int(apart is not None and apart.is_rounding)),
        margins=_margins(rescored),
    )


def _finding(kind: Kind, found: AuditedText, one: Difference) -> Finding:
    origin = found.origins[one.index] if one.index < len(found.origins) else "ended"
    return Finding(kind, found.prompt, one.index, origin, one.token, one.pick, one.gap)


def _first_apart(
    rescored: Rescored, speculative: Completion, plain: Completion, runner: ModelRunner
) -> Difference | None:
    """Where the two texts part: from there on they have nothing to do with each other."""
    pairs = zip_longest(speculative.token_ids, plain.token_ids, fillvalue=-1)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if index is None:
        if (speculative.text, speculative.finish_reason) == (plain.text, plain.finish_reason):
            return None
        return Difference(len(plain.token_ids), -1, -1, torch.inf, is_rounding=False)
    if index >= min(len(speculative.token_ids), len(plain.token_ids)):  # one of them goes on where the other ended
        token, other = (*speculative.token_ids, -1)[index], (*plain.token_ids, -1)[index]
        return Difference(index, token, other, torch.inf, is_rounding=False)
    a, b = speculative.token_ids[index], plain.token_ids[index]
    # Up to here they are one text: the same row judges both, and one of them at the least is not its pick
    row = Rescored(index, (a,), rescored.logits[index : index + 1], rescored.rows[index : index + 1])
    judged = [
        difference for token in (a, b) for difference in differences(replace(row, tokens=(token,)), computed_in(runner))
    ]
    worst = max(judged, key=lambda one: one.gap)
    return replace(worst, token=a, pick=b, is_rounding=all(one.is_rounding for one in judged))


def _divergences(
    rescored: Rescored, entries: Mapping[int, Entry], runner: ModelRunner
) -> tuple[tuple[tuple[int, float], ...], float]:
    """KL by output token, of what the logits that were used amount to from what a plain pass's do; and the most that rounding
    explains. A greedy row is taken at temperature 1: its own law has one token."""
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
