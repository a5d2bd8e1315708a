"""What a step costs, measured: t_plain(batch), t_verify(rows), draft and network time. The cost half of goodput.

A pass is plain (a row for each sequence that it has room for) or verifying (more). The two are kept apart, since other
kernels may serve them; plain passes stand in for verifying ones of a size not measured. Samples fall into buckets of rows,
exact below 16 and eight to a doubling above, each a decayed mean of both rows and seconds. Steps with prefill rows are
ignored.

Attention makes every pass slower as contexts grow, by so much a token whatever the rows: where a warm-up has measured that,
curves are of passes without any context. What is left of it, and all else that changes slowly, a common `scale` follows: it
learns from whatever is measured and carries along what is not. A warm-up measures passes one by one with the host in the
way: its curve has about the right shape at the wrong height. The first plain steps after it move the scale alone; after them
what it said of a size is worth one step of that size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.errors import InvalidConfig
from paceline.speculation.depth.curve import Curve
from paceline.speculation.depth.draft_time import DraftTime, Line
from paceline.speculation.depth.policy import StepObservation

WINDOW = 16.0
"""Samples a bucket remembers."""
DRIFT = 0.5
"""Share of what a mature bucket learns from a sample that all buckets learn with it."""
FIRST_STEPS = 8
"""Plain steps after a warm-up that correct its height."""
_LEAST_SHARE = 0.25
"""Of a pass that is not its context's, whatever a warm-up has said of that."""
FORGET_STEPS = 4000
"""A verify bucket not visited for so long is dropped: it may be what keeps us from visiting it."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a drafting step: verify(rows) + network + the line of every method asked, at its deepest draft."""

    curve: Curve
    scale: float
    context: float
    """Of reading what the sequences have, in any pass over them."""
    network: float
    lines: Mapping[str, Line]
    """By method; one that was never timed has none."""

    def verify(self, rows: float) -> float:
        """A pass over `rows` target rows, drafts among them."""
        return self.scale * self.curve(rows) + self.context


@dataclass(slots=True)
class _Bucket:
    rows: float
    seconds: float
    """Divided by the common scale."""
    weight: float
    seen: int
    is_warm: bool = False
    """A warm-up measured it first."""


class StepTime:
    """The only writer of measured costs."""

    def __init__(self) -> None:
        self._plain: dict[int, _Bucket] = {}
        self._verify: dict[int, _Bucket] = {}
        self._curves: dict[bool, Curve] = {}
        self._scale = 1.0
        self._steps = 0
        self._unsure = 0
        self._drafts: dict[str, DraftTime] = {}
        self._network = 0.0
        self._per_token = 0.0  # of context

    def calibrate(self, passes: Mapping[int, float], per_token: float = 0.0) -> None:
        """Take on {rows: seconds} from a warm-up, and the seconds that each token of context adds to a pass."""
        if any(rows < 1 or seconds <= 0.0 for rows, seconds in passes.items()) or per_token < 0.0:
            raise InvalidConfig(
                f"calibration needs rows >= 1, seconds > 0 and per_token >= 0, got {dict(passes)}, {per_token}"
            )
        self._per_token = per_token
        for rows, seconds in passes.items():
            self._plain[_bucket(rows)] = _Bucket(rows, seconds / self._scale, 1.0, self._steps, is_warm=True)
        self._unsure = FIRST_STEPS
        self._curves.clear()

    def observe(self, step: StepObservation) -> None:
        self._steps += 1
        asked = {drafting.method for drafting in step.drafting}
        for method, draft in self._drafts.items():
            if method not in asked:
                draft.idle()
            elif not step.is_timed:
                draft.caught_up()
        if not step.is_timed:
            return
        if step.prefill_rows or step.batch == 0 or step.verify_seconds <= 0.0:
            return
        most = (1.0 - _LEAST_SHARE) * step.verify_seconds
        if self._per_token * step.context > most:  # it cannot be so dear
            self._per_token = most / step.context
        self._add(step.rows, step.verify_seconds - self._per_token * step.context, drafting=step.rows > step.room)
        for drafting in step.drafting:
            self._drafts.setdefault(drafting.method, DraftTime()).add(step.room, drafting.depth, drafting.seconds)
        if step.drafting:
            surprise = min(step.network_seconds, 4.0 * self._network) if self._network else step.network_seconds
            self._network += (surprise - self._network) / (WINDOW if self._network else 1.0)

    def plain(self, room: int, context: int = 0) -> float | None:
        """Seconds of a pass without drafts, with room for so many sequences, which have `context` tokens together; None until
        anything was measured."""
        curve = self._curve(drafting=False)
        return None if curve is None else self._scale * curve(room) + self._per_token * context

    def costs(self, room: int, context: int = 0) -> Costs | None:
        """What drafting for so many sequences costs; None until both a pass and a draft were measured."""
        curve = self._curve(drafting=True)
        lines = {method: line for method, draft in self._drafts.items() if (line := draft.line(room)) is not None}
        if curve is None or not lines:
            return None
        return Costs(curve, self._scale, self._per_token * context, self._network, lines)

    def usual(self, step: StepObservation) -> float | None:
        """What such a step takes as far as is known."""
        costs = self.costs(step.room, step.context)
        if costs is None or any(drafting.method not in costs.lines for drafting in step.drafting):
            return None
        drafting = sum(costs.lines[drafting.method].seconds(drafting.depth) for drafting in step.drafting)
        return costs.verify(step.rows) + costs.network + drafting

    def is_settled(self, method: str) -> bool:
        """Whether the method's drafts were timed often enough to go by."""
        return method in self._drafts and self._drafts[method].is_settled

    def knows_slope(self, method: str, room: int) -> bool:
        """Whether it was timed at more than one depth of late."""
        return method in self._drafts and self._drafts[method].knows_slope(room)

    def _add(self, rows: int, seconds: float, drafting: bool) -> None:
        buckets = self._verify if drafting else self._plain
        bucket = buckets.get(_bucket(rows))
        curve = self._curve(drafting)
        if bucket is None:
            # A first sample is all we have: bound it by what its neighbours suggest.
            expected = seconds if curve is None else self._scale * curve(rows)
            seconds = min(max(seconds, expected / 4.0), expected * 4.0)
            buckets[_bucket(rows)] = _Bucket(rows, seconds / self._scale, 1.0, self._steps)
        else:
            expected = self._scale * bucket.seconds
            mature = bucket.weight >= WINDOW / 2.0
            limit = 1.5 if mature or bucket.is_warm else 4.0
            bucket.weight = min(WINDOW, bucket.weight + 1.0)
            # Geometric means: with both factors powers of the same ratio, noise cannot push scale and bucket apart.
            surprise = min(max(seconds / expected, 1.0 / limit), limit)
            learned = surprise ** (1.0 / bucket.weight)
            shared = learned**DRIFT if mature else 1.0
            if self._unsure and not drafting and bucket.is_warm:
                self._unsure -= 1
                learned = shared = surprise ** (
                    1.0 / (1 + FIRST_STEPS - self._unsure)
                )  # as if the warm-up were one more step
            self._scale *= shared
            bucket.seconds *= learned / shared
            bucket.rows += (rows - bucket.rows) / bucket.weight
            bucket.seen = self._steps
        self._curves.pop(True, None)
        if not drafting or not self._plain:
            self._curves.pop(False, None)

    def _curve(self, drafting: bool) -> Curve | None:
        curve = self._curves.get(drafting)
        if curve is None and (self._plain or self._verify):
            buckets = self._plain or self._verify
            if drafting and self._plain:
                oldest = self._steps - FORGET_STEPS
                buckets = buckets | {key: bucket for key, bucket in self._verify.items() if bucket.seen > oldest}
            curve = Curve([(bucket.rows, bucket.seconds, bucket.weight) for bucket in buckets.values()])
            self._curves[drafting] = curve
        return curve


def _bucket(rows: int) -> int:
    """1, 2, … 15, then eight to a doubling."""
    step = 1 << max(0, rows.bit_length() - 4)
    return rows // step * step
