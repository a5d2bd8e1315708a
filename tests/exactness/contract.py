"""The contract on a real model: the same text, or a first difference where the two best tokens were closer than rounding."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.request import Request
from paceline.models.decoder.forward import DecoderModel
from paceline.speculation.distribution.distribution import log_distribution
from paceline.speculation.rows.noise import Purpose, gumbel
from paceline.speculation.rows.rows import RowContext
from tests.exactness.suite import next_logits

GAP = 1e-4
"""float32: two scores closer than this may swap when the rows of a product are added up in another order."""


@dataclass(frozen=True)
class Difference:
    request: str
    choice: int
    position: int
    gap: float


def differences(
    model: DecoderModel,
    requests: Sequence[Request],
    plain: dict[tuple[str, int], list[int]],
    speculative: dict[tuple[str, int], list[int]],
) -> list[Difference]:
    """Where texts part, with the gap between the two best scores of plain decoding there."""
    found = []
    for request in requests:
        for choice in range(request.sampling.n):
            ours, theirs = plain[request.id, choice], speculative[request.id, choice]
            if ours == theirs:
                continue
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            found.append(Difference(request.id, choice, at, score_gap(model, request, choice, ours[:at])))
    return found


def score_gap(model: DecoderModel, request: Request, choice: int, output: Sequence[int]) -> float:
    ids = [*request.prompt_ids, *output]
    seed = request.sampling.seed or 0
    row = RowContext(request.sampling, seed, choice, len(ids), ids, len(request.prompt_ids))
    logits = next_logits(model, ids).unsqueeze(0)
    scores = logits
    if not request.sampling.is_greedy:
        scores = log_distribution(logits, [row]) + gumbel([row.key], Purpose.SHARED, logits.shape[1], logits.device)
    best = scores[0].topk(2).values
    return float(best[0] - best[1])


def check_contract(found: Sequence[Difference], is_bitwise: bool) -> None:
    """With kernels whose rows do not depend on the batch nothing may differ at all."""
    print(f"{len(found)} differences: {[(d.request, d.position, f'{d.gap:.1e}') for d in found]}")
    assert not is_bitwise or not found
    assert all(d.gap < GAP for d in found)
