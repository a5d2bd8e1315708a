"""The measured costs of a step: t_plain(batch), t_verify(rows), draft time and network time.

A plain pass has one row for each slot, a verifying pass has more. The two are measured apart, since different kernels may serve
them; plain passes stand in for verifying ones of a size not measured. Samples fall into buckets of rows, exact below 16 and
eight to a doubling above, each a decayed mean of rows and seconds. Steps with prefill rows are ignored.

Attention makes every pass slower by a constant time per token of context. If a warm-up has measured that time, the curves are
of passes without context. A common `scale` follows the rest of it and all other slow changes: it learns from every
measurement and moves sizes that were not measured. A warm-up measures single passes: its curve has about the right shape at
the wrong height. The first plain steps after it move the scale alone; afterwards its sample of a size weighs as one step.

`HostTime` is the time of the host between two passes: commit, cache moves, the decision on the next drafts, delivery of tokens.
The device waits for it. The host works longer after a step with drafts, which commits more tokens and is followed by a decision
on the next drafts. How long it worked after a step is known when the next step begins.

`DraftTime` is the seconds that one method takes to draft, c0 + c1 * depth. It is fitted by decayed least squares for each scale
(power of two) of the batch.

With samples of one depth, c0 and c1 cannot be separated. A small penalty on c0 then makes time proportional to depth: right
for an autoregressive draft, pessimistic for one that drafts all tokens in a single pass, until a second depth is measured.
`has_slope` is true if one was.
"""

import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from paceline.core.errors import InvalidConfig
from paceline.policy.cost.curve import Curve, LinearCost, LinearFit, isotonic
from paceline.policy.depth.observation import StepObservation

_DECAY = 1.0 - 1.0 / 32.0
_PENALTY = 0.02
_SETTLED_SAMPLES = 2
_CALIBRATED_DEPTHS = (1, 4)
"""Depths for which a warm-up counts as a sample."""
_MAX_RATIO = 4.0
"""Measured over expected time above which a sample is clipped, and under whose inverse the old samples are discarded."""
_CALIBRATED_RATIO = 1.5
"""The same limit after a warm-up, which has measured drafts before."""


@dataclass(slots=True)
class _Samples:
    """The times of one scale of the batch."""

    fit: LinearFit = field(default_factory=lambda: LinearFit(_DECAY))
    shallowest: int = sys.maxsize

    def add(self, depth: int, seconds: float) -> None:
        self.fit.add(depth, seconds)
        self.shallowest = min(self.shallowest, depth)

    def line(self) -> LinearCost:
        return self.fit.cost(_PENALTY)


class DraftTime:
    """Learns the drafting time of one method."""

    def __init__(self) -> None:
        self._scales: dict[int, _Samples] = {}
        self._was_idle = True
        self._num_samples = 0
        self._max_ratio = _MAX_RATIO

    def calibrate(self, lines: Mapping[int, LinearCost]) -> None:
        """Start from the lines of a warm-up, by number of sequences."""
        for batch, line in lines.items():
            samples = self._scales[batch.bit_length()] = _Samples()
            for depth in _CALIBRATED_DEPTHS:
                samples.add(depth, line.seconds(depth))
        self._num_samples, self._max_ratio = _SETTLED_SAMPLES, _CALIBRATED_RATIO

    @property
    def is_settled(self) -> bool:
        """Whether the line rests on more than one sample."""
        return self._num_samples >= _SETTLED_SAMPLES

    def skip_idle(self) -> None:
        """The method did not draft in a step."""
        self._was_idle = True

    def skip_untimed(self) -> None:
        """The method drafted in an untimed step."""
        self._was_idle = False

    def add(self, batch: int, depth: int, seconds: float) -> None:
        self._num_samples += 1
        line, scale = self.line(batch), batch.bit_length()
        was_idle, self._was_idle = self._was_idle, False
        if line is not None:
            expected = line.seconds(depth)
            # HAZARD: after an idle step the time includes what the draft had to catch up with: it is only an upper bound.
            if was_idle and seconds > expected:
                return
            seconds = min(seconds, self._max_ratio * expected)
        samples = self._scales.setdefault(scale, _Samples())
        # HAZARD: the first draft may compile and load. No sample is too short: if a draft at least as deep takes a small
        # part of the expected time, the old samples did not measure drafting.
        if samples.shallowest <= depth and seconds < samples.line().seconds(samples.shallowest) / _MAX_RATIO:
            samples = self._scales[scale] = _Samples()
        samples.add(depth, seconds)

    def line(self, batch: int) -> LinearCost | None:
        """None until something was measured. A scale without samples uses the nearest."""
        return self._nearest(batch).line() if self._scales else None

    def has_slope(self, batch: int) -> bool:
        """Whether `line` rests on more than one depth."""
        return bool(self._scales) and self._nearest(batch).fit.has_spread(_PENALTY)

    def _nearest(self, batch: int) -> _Samples:
        scale = batch.bit_length()
        return self._scales[min(self._scales, key=lambda seen: (abs(seen - scale), seen))]


HOST_WINDOW = 32
"""Steps remembered of each kind; their median counts, so that single pauses do not."""
LEAST = 2
"""Number of steps of a kind before its time is used. It is low because few steps are plain while drafts clearly pay."""


@dataclass(frozen=True, slots=True)
class _Kind:
    scale: int
    """Bits of the batch: a power of two."""
    has_drafts: bool


class HostTime:
    """Learns the host time of steps whose batch is ragged. Steps of a padded batch overlap with the host."""

    def __init__(self) -> None:
        self._seen: dict[_Kind, deque[float]] = {}
        self._last: _Kind | None = None
        """Kind of the previous step. None if the previous step is not measured."""

    def observe(self, step: StepObservation) -> None:
        if step.host_seconds is not None and self._last is not None and not step.prefill_rows:
            self._seen.setdefault(self._last, deque(maxlen=HOST_WINDOW)).append(step.host_seconds)
        is_usual = step.batch and step.slots is None and step.is_timed and not step.prefill_rows
        self._last = _Kind(step.batch.bit_length(), bool(step.drafting)) if is_usual else None

    def plain(self, batch: int) -> float:
        """Seconds after a step without drafts; 0 while not known."""
        return self._median(_Kind(batch.bit_length(), False)) or 0.0

    def drafting(self, batch: int) -> float:
        """Seconds after a step with drafts; as `plain` while not known."""
        found = self._median(_Kind(batch.bit_length(), True)) if self.plain(batch) else None
        return self.plain(batch) if found is None else found

    def _median(self, kind: _Kind) -> float | None:
        seen = self._seen.get(kind, ())
        return median(seen) if len(seen) >= LEAST else None


WINDOW = 16.0
"""Samples that a bucket remembers."""
SHARED = 0.5
"""Share of what a mature bucket learns from a sample that all buckets learn with it."""
FIRST_STEPS, CORRECTED_STEPS = 8, 256
"""Plain steps after a warm-up that correct its height, and steps of any kind after which none does: a size that is first
measured later shows its own time, not that of all sizes."""
FORGET_STEPS = 4000
"""Steps after which an unvisited verify bucket is dropped: it may be the reason that no step visits it."""
_MIN_SHARE = 0.25
"""Smallest share of a pass that is not the cost of its context."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a drafting step: verify(rows) + network + host + the line of every drafting method at its deepest draft."""

    curve: Curve
    scale: float
    context: float
    """Time to read the context of the batch, in any pass."""
    network: float
    lines: Mapping[str, LinearCost]
    """Draft time by method; a method that was never timed has none."""
    prompt_rows: float = 0.0
    """Prompt rows in the pass for each token that it commits."""
    prompt_seconds: float = 0.0
    """Draft prefill of a prompt row."""
    host: float = 0.0
    """Time of the host after the step; 0 for a padded batch."""

    @property
    def fixed(self) -> float:
        """Seconds of every drafting step, however many drafts it has."""
        return self.network + self.host

    def verify(self, rows: float) -> float:
        """A pass over `rows` target rows, drafts included."""
        return self.scale * self.curve(rows) + self.context


@dataclass(slots=True)
class _Bucket:
    rows: float
    seconds: float
    """Seconds divided by the common scale."""
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
        self._num_corrections = 0  # plain steps that still correct the height of a warm-up
        self._corrected_until = 0  # the step after which they do not
        self._drafts: dict[str, DraftTime] = {}
        self._network = 0.0
        self._host = HostTime()
        self._per_token = 0.0  # seconds per token of context
        self._is_calibrated = False

    def calibrate(self, passes: Mapping[int, float], per_token: float = 0.0) -> None:
        """Start from the {rows: seconds} of a warm-up and the seconds that each token of context adds to a pass."""
        if any(rows < 1 or seconds <= 0.0 for rows, seconds in passes.items()) or per_token < 0.0:
            raise InvalidConfig(
                f"calibration needs rows >= 1, seconds > 0 and per_token >= 0, got {dict(passes)}, {per_token}"
            )
        self._per_token, self._is_calibrated = per_token, True
        for rows, seconds in passes.items():
            self._plain[_bucket(rows)] = _Bucket(rows, seconds / self._scale, 1.0, self._steps, is_warm=True)
        self._num_corrections, self._corrected_until = FIRST_STEPS, self._steps + CORRECTED_STEPS
        self._curves.clear()

    def calibrate_drafts(self, method: str, lines: Mapping[int, LinearCost]) -> None:
        """Start from the draft times of a warm-up, by number of sequences."""
        self._drafts.setdefault(method, DraftTime()).calibrate(lines)

    def observe(self, step: StepObservation) -> None:
        self._steps += 1
        self._host.observe(step)
        methods = {drafting.method for drafting in step.drafting}
        for method, draft in self._drafts.items():
            if method not in methods:
                draft.skip_idle()
            elif not step.is_timed:
                draft.skip_untimed()
        if not step.is_timed or step.batch == 0:
            return
        for drafting in step.drafting:  # its time does not depend on prompts in the target's pass
            self._drafts.setdefault(drafting.method, DraftTime()).add(step.num_slots, drafting.depth, drafting.seconds)
        if step.prefill_rows or step.verify_seconds <= 0.0:
            return
        most = (1.0 - _MIN_SHARE) * step.verify_seconds
        if self._per_token * step.context > most:  # the warm-up overestimated it
            self._per_token = most / step.context
        self._add(step.rows, step.verify_seconds - self._per_token * step.context, drafting=step.rows > step.num_slots)
        if step.drafting:
            sample = min(step.network_seconds, 4.0 * self._network) if self._network else step.network_seconds
            self._network += (sample - self._network) / (WINDOW if self._network else 1.0)

    def plain(self, slots: float, context: int = 0) -> float | None:
        """Seconds of a pass without drafts over `slots` rows, whose sequences have `context` tokens together; None until a
        pass was measured."""
        curve = self._curve(drafting=False)
        return None if curve is None else self._scale * curve(slots) + self._per_token * context

    def plain_host(self, batch: int) -> float:
        """Seconds of the host after a plain step of a ragged batch."""
        return self._host.plain(batch)

    def costs(self, slots: int, context: int = 0, is_padded: bool = False) -> Costs | None:
        """The cost of drafting for `slots` sequences. None until a pass and a draft were measured."""
        curve = self._curve(drafting=True)
        lines = {method: line for method, draft in self._drafts.items() if (line := draft.line(slots)) is not None}
        if curve is None or not lines:
            return None
        host = 0.0 if is_padded else self._host.drafting(slots)
        return Costs(curve, self._scale, self._per_token * context, self._network, lines, host=host)

    def expected(self, step: StepObservation) -> float | None:
        """The time that such a step takes, if known."""
        costs = self.costs(step.num_slots, step.context)
        if costs is None or any(drafting.method not in costs.lines for drafting in step.drafting):
            return None
        drafting = sum(costs.lines[drafting.method].seconds(drafting.depth) for drafting in step.drafting)
        return costs.verify(step.rows) + costs.network + drafting

    def is_settled(self, method: str) -> bool:
        """Whether the drafts of the method were timed more than once."""
        return method in self._drafts and self._drafts[method].is_settled

    def has_slope(self, method: str, slots: int) -> bool:
        """Whether the method was recently timed at more than one depth."""
        return method in self._drafts and self._drafts[method].has_slope(slots)

    def _add(self, rows: int, seconds: float, drafting: bool) -> None:
        buckets = self._verify if drafting else self._plain
        bucket = buckets.get(_bucket(rows))
        if bucket is None:
            # A first sample has nothing to be averaged with: bound it by its neighbours. After a warm-up, which measured passes
            # of many sizes, they count as one sample: the first steps of a request are slow where processes share few cores.
            curve = self._curve(drafting)
            expected = seconds if curve is None else self._scale * curve(rows)
            limit, weight = (2.0, 0.5) if self._is_calibrated else (4.0, 1.0)
            ratio = min(max(seconds / expected, 1.0 / limit), limit)
            buckets[_bucket(rows)] = _Bucket(rows, expected * ratio**weight / self._scale, 1.0, self._steps)
        else:
            expected = self._scale * bucket.seconds
            is_mature = bucket.weight >= WINDOW / 2.0
            limit = 1.5 if is_mature or bucket.is_warm else 4.0
            bucket.weight = min(WINDOW, bucket.weight + 1.0)
            # Geometric means: the two factors are powers of the same ratio, so noise cannot push scale and bucket apart.
            ratio = min(max(seconds / expected, 1.0 / limit), limit)
            learned = ratio ** (1.0 / bucket.weight)
            shared = learned**SHARED if is_mature else 1.0
            is_corrected = self._num_corrections and self._steps <= self._corrected_until
            if is_corrected and not drafting and bucket.is_warm:
                self._num_corrections -= 1
                # The warm-up weighs as one more step.
                learned = shared = ratio ** (1.0 / (1 + FIRST_STEPS - self._num_corrections))
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
            points = isotonic((bucket.rows, bucket.seconds, bucket.weight) for bucket in buckets.values())
            curve = Curve(points, "slope")
            self._curves[drafting] = curve
        return curve


def _bucket(rows: int) -> int:
    """1, 2, … 15, then eight to a doubling."""
    step = 1 << max(0, rows.bit_length() - 4)
    return rows // step * step
