"""The statistics of an audit: a two-sample test on sampled tokens, and the divergence of distributions.

The two-sample test is Kolmogorov-Smirnov on the ranks of tokens under the target's distribution. The rank of a token is the
probability of all likelier tokens plus a random part of its own. It is uniform on (0, 1) for a token sampled from p, whatever p
is. So the tokens of all prompts and positions form one sample.

`VerifyLog` records the inputs of verification for every output token: logits or `p`, and the `q` of each tested draft.
`divergence` is the Kullback-Leibler divergence of a used distribution from that of a plain pass.
"""

import math
import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor

from paceline.core.errors import MissingDependency
from paceline.core.sequence import Sequence
from paceline.engine import StepHook
from paceline.engine.step.step import SequenceResult, StepResult
from paceline.requests import Grammar
from paceline.speculation.distribution import log_distribution
from paceline.speculation.rows import Purpose, RowContext, gumbel

LEVEL = 1e-3
"""Probability of a false alarm."""
MISS = 0.01
"""Probability to miss a detectable difference."""


@dataclass(frozen=True, slots=True)
class TwoSample:
    """The result of the test."""

    sizes: tuple[int, int]
    distance: float
    """Largest distance between the two empirical distribution functions."""
    p_value: float

    @property
    def is_different(self) -> bool:
        return self.p_value < LEVEL

    @property
    def detectable(self) -> float:
        """The smallest true distance that is found with probability 1 - MISS, by Hoeffding's inequality.

        A value of 1 or more means that the samples are too small.
        """
        spread = sum(1.0 / size for size in self.sizes) if all(self.sizes) else math.inf
        critical = math.sqrt(-math.log(LEVEL / 2.0) / 2.0 * spread)
        return critical + math.sqrt(-math.log(MISS) / 2.0 * spread)


def rank(probs: Tensor, token: int, rng: random.Random) -> float:
    """The randomised rank of a token under `probs` [V]."""
    own, before = probs[token], probs[:token]
    return float(probs[probs > own].sum() + before[before == own].sum()) + rng.random() * float(own)


def compare(first: Seq[float], second: Seq[float]) -> TwoSample:
    """Test whether two samples of ranks have one distribution."""
    stats = require_scipy()
    if not first or not second:
        return TwoSample((len(first), len(second)), 0.0, 1.0)
    found = stats.ks_2samp(first, second, method="asymp")
    return TwoSample((len(first), len(second)), float(found.statistic), float(found.pvalue))


def require_scipy() -> ModuleType:
    """`scipy.stats`. Raises an error with the install command if scipy is missing."""
    try:
        from scipy import stats
    except ImportError:
        raise MissingDependency("scipy", "an audit of rejection sampling", "bench") from None
    return stats


@dataclass(frozen=True, slots=True, eq=False)
class LoggedToken:
    """One output token."""

    logits: Tensor  # [V]
    p: Tensor | None  # [V]. None in a coupled round
    q: Tensor | None  # [V]. None if no token was drafted here, or if q is one-hot
    drafted: int | None
    """Draft that was tested here, which is the token itself or the token that it replaced. None if no token was drafted
    here."""


class VerifyLog(StepHook):
    """Keeps rows of the vocabulary's width, so `take` the entries of a text as soon as it is finished."""

    needs_logits = True

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int], dict[int, LoggedToken]] = {}

    def sequence_added(self, sequence: Sequence, grammar: Grammar | None) -> None:
        self._entries[sequence.request_id, sequence.choice] = {}

    def verified(self, result: StepResult) -> None:
        for row in result.sequences:
            if row.verdict is not None and row.logits is not None:
                self._add(row, row.logits)

    def take(self, request_id: str, choice: int) -> dict[int, LoggedToken]:
        """Entries of a finished text by output token. A stop may have cut the last round, so that there are more entries than
        tokens. Steps that ran as graphs leave no entries."""
        return self._entries.pop((request_id, choice), {})

    def _add(self, row: SequenceResult, logits: Tensor) -> None:
        sequence, draft, verdict = row.sequence, row.draft, row.verdict
        entries = self._entries.get((sequence.request_id, sequence.choice))
        if entries is None or verdict is None:
            return
        path = [0, *(1 + node for node in verdict.path)]
        # Indexing copies, so that the tensors of the batch can be freed
        logits, p = logits[path], None if verdict.p is None else verdict.p[path]
        # Only chains are sampled from a q. Nodes after the first rejected one were not tested.
        q = draft.q(logits.shape[1]) if p is not None and draft.is_chain else None
        for place in range(len(path)):
            is_tested = q is not None and place < len(draft)
            entries[sequence.num_output + place] = LoggedToken(
                logits[place],
                None if p is None else p[place],
                q[place].clone() if q is not None and is_tested else None,
                draft.tokens[place] if is_tested else None,
            )


NEGLIGIBLE = 1e-12
"""Probabilities below this count as 0: float32 underflow depends on the implementation of exp."""
TIE = 1e-5
"""Largest difference of equal scores: q went through exp and log since it was sampled from."""
FLOOR = 1e-8


def limit(tolerance: float, temperature: float) -> float:
    """The largest KL that rounding explains. An error d of the logits makes KL about Var(d / T) / 2, and here |d| <=
    tolerance."""
    return max(FLOOR, 2.0 * (tolerance / temperature) ** 2)


def divergence(used: Tensor, logits: Tensor, row: RowContext, tolerance: float) -> float:
    """KL(used || plain) of one row: `used` [V] are probabilities, `logits` [V] those of a plain pass.

    It is infinite if the two distributions have different possible tokens. Tokens within rounding of a truncation's edge are
    excluded.
    """
    plain = log_distribution(logits.unsqueeze(0), [row])[0].double().exp()
    u = used.to(plain.device).double()
    both = (u > 0) & (plain > 0)
    alone = ((u > 0) ^ (plain > 0)) & (u + plain > NEGLIGIBLE)
    if bool(alone.any()) and not _is_edge(alone, plain > 0, logits, row, tolerance):
        return torch.inf
    u, plain = u[both] / u[both].sum(), plain[both] / plain[both].sum()
    return max(0.0, float((u * (u / plain).log()).sum()))


def is_sample(q: Tensor, drafted: int, row: RowContext) -> bool:
    """Whether `drafted` is the sample of `q` under the draft's noise at this position: argmax(log q + G)."""
    scores = q.double().log() + gumbel([row.key], Purpose.DRAFT, len(q), q.device)[0]
    return float(scores.max() - scores[drafted]) <= TIE


def _is_edge(alone: Tensor, kept: Tensor, logits: Tensor, row: RowContext, tolerance: float) -> bool:
    whole = replace(row, params=replace(row.params, top_k=0, top_p=1.0, min_p=0.0))
    scores = log_distribution(logits.unsqueeze(0), [whole])[0]
    edge = scores[kept].min()
    return bool(((scores[alone] - edge).abs() <= tolerance / row.params.temperature).all())
