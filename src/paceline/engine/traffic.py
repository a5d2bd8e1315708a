"""The traffic of an engine by class and by method: statistics, draft trials and the default method.

`TrafficStatistics` counts time by part of a step and speculation by traffic class, for reports. No decision uses these counts,
except the breaker and the drift test of each class, which the engine reads here.

`TrialTraffic` gives the traffic class of every sequence. While a draft on trial drafts for a sequence, its class is another
one, so that the draft in use keeps what was learned of it.

`DefaultMethod` chooses the method of requests that name none, if an engine has an in-engine draft and a draft pool. It is pure.
It compares the goodput that steps had with each method at about the present load. Goodput is the tokens per second of one
sequence, over windows of steps in which all sequences had that method. Nothing is inferred from parts of a step: the time that
a step needs in addition to drafts and passes differs between methods, since an in-engine draft runs inside CUDA graphs and a
pool does not.

Sequences that start together get one method, and later sequences get the same until the choice changes: a batch with two
methods cannot run as a graph. A share of consecutive sequences tries the other method. The choice for a load changes at the end
of a trial only, so that the two methods were measured lately, and by a margin and an error bound, so that equal methods do not
alternate.
"""

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, variance
from typing import TYPE_CHECKING

from paceline.core.sequence import Sequence
from paceline.core.status import BreakerState, TrafficStatus
from paceline.core.traffic import TrafficClass
from paceline.policy.cost.curve import ROUNDS_KEEP
from paceline.policy.depth.acceptance import PRIOR_ALPHA, known_positions
from paceline.policy.depth.breaker import Breaker
from paceline.policy.depth.drift import AcceptanceChange, DriftTest
from paceline.policy.depth.observation import RoundObservation

if TYPE_CHECKING:
    from paceline.speculation import Proposer

logger = logging.getLogger(__name__)

DRAFT, NETWORK, VERIFY = "draft", "network", "verify"
"""Parts of a drafting step: drafting, the network's share of the wait for drafts, and the target's pass."""
PLAIN = "plain"
"""A step without drafts."""
PROMPT = "prompt"
"""A step with prefill. Its time is counted apart from that of other steps."""

DECLINED = "declined"
"""The depth policy expects plain decoding to be faster."""
BREAKER = "breaker"
"""The breaker is open, or half open and another sequence probes."""
NO_ROOM = "no_room"
"""No rows or blocks were left for drafts."""
NO_DRAFT = "no_draft"
"""The proposer returned no draft in time, or an invalid one."""
FALLBACKS = (DECLINED, BREAKER, NO_ROOM, NO_DRAFT)
"""Reasons for which a sequence with speculation decoded plainly."""


class StepTotals:
    """Time of steps by part. One thread writes; any thread may read."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys((DRAFT, NETWORK, VERIFY, PLAIN, PROMPT), 0.0)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by part, since the start; a copy."""
        return dict(self._seconds)

    def add(self, prefill_rows: int, drafted: bool, draft: float, network: float, verify: float) -> None:
        """Add one step. `drafted` is true if drafts were requested for it."""
        if prefill_rows:
            self._seconds[PROMPT] += draft + network + verify
        elif drafted:
            self._seconds[DRAFT] += draft
            self._seconds[NETWORK] += network
            self._seconds[VERIFY] += verify
        else:
            self._seconds[PLAIN] += draft + network + verify


class ClassCounts:
    """Counts of one traffic class, and means over about 128 rounds."""

    def __init__(self) -> None:
        self._hits: list[float] = []
        self._trials: list[float] = []
        self._depths = 0.0
        self._decisions = 0.0
        self._fallbacks: Counter[str] = Counter(dict.fromkeys(FALLBACKS, 0))
        self._drafted = self._accepted = self._tested = self._drifts = 0
        self._drift: tuple[float, float] | None = None

    def add_round(self, drafted: int, accepted: int) -> None:
        """Count one round. alpha_i = accepted at i / tested at i; positions after the first rejection are not tested."""
        known = known_positions(drafted, accepted)
        self._drafted += drafted
        self._accepted += accepted
        self._tested += known
        missing = known - len(self._trials)
        if missing > 0:
            self._hits += [0.0] * missing
            self._trials += [0.0] * missing
        for i in range(known):
            self._trials[i] = ROUNDS_KEEP * self._trials[i] + 1.0
            self._hits[i] = ROUNDS_KEEP * self._hits[i] + (i < accepted)

    def add_depth(self, depth: int, count: int = 1) -> None:
        """Count `count` decisions for this depth, one after another."""
        kept = ROUNDS_KEEP**count
        new = (1.0 - kept) / (1.0 - ROUNDS_KEEP)
        self._depths = kept * self._depths + new * depth
        self._decisions = kept * self._decisions + new

    def add_fallback(self, reason: str, count: int = 1) -> None:
        self._fallbacks[reason] += count

    def add_drift(self, change: AcceptanceChange) -> None:
        self._drifts += 1
        self._drift = (change.before, change.after)

    @property
    def first_alpha(self) -> float | None:
        """The recent acceptance of first drafts. None if no draft was verified."""
        return self._hits[0] / self._trials[0] if self._trials else None

    def report(self, traffic: TrafficClass, breaker: BreakerState) -> TrafficStatus:
        return TrafficStatus(
            method=traffic.method,
            category=traffic.shown_category,
            breaker=breaker,
            alphas=tuple(hits / trials for hits, trials in zip(self._hits, self._trials, strict=True)),
            mean_depth=self._depths / self._decisions if self._decisions else 0.0,
            fallbacks=dict(self._fallbacks),
            drafted=self._drafted,
            accepted=self._accepted,
            tested=self._tested,
            drifts=self._drifts,
            drift=self._drift,
        )


class TrafficStatistics:
    """Holds the breaker, the drift test, and the counts for reports of every traffic class."""

    def __init__(self, breaker: Breaker) -> None:
        self.breaker = breaker
        self.drift = DriftTest()
        self._counts: defaultdict[TrafficClass, ClassCounts] = defaultdict(ClassCounts)

    def observe(
        self, rounds: Iterable[RoundObservation], now: float, advantage: float | None
    ) -> list[AcceptanceChange]:
        """Count the rounds of one step, decided at that `advantage`. Returns the classes that have changed."""
        changes = []
        for round_ in rounds:
            counts = self._counts[round_.traffic]
            if not round_.drafted:
                counts.add_fallback(NO_DRAFT)
                continue
            counts.add_round(round_.drafted, round_.accepted)
            self.breaker.record(round_.traffic, round_.drafted, round_.accepted, now, advantage)
            change = self.drift.observe(round_.traffic, round_.sequence_id, round_.is_first_accepted)
            if change is not None:
                changes.append(change)
        return self._log(changes)

    def close(self, sequence_ids: Iterable[int]) -> list[AcceptanceChange]:
        """End these sequences, whose rounds are all observed. Returns the classes that have changed with them."""
        return self._log(self.drift.close(sequence_ids))

    def count_decision(self, traffic: TrafficClass, depth: int, is_allowed: bool, count: int = 1) -> None:
        """Count the depth of `count` sequences that may draft by their request. `is_allowed` is true if the breaker allows it
        too."""
        counts = self._counts[traffic]
        counts.add_depth(depth, count)
        if depth == 0:
            counts.add_fallback(DECLINED if is_allowed else BREAKER, count)

    def count_declined(self, classes: Iterable[TrafficClass]) -> None:
        """Count a plain step without a decision. `classes` are those of the sequences that may draft by their request."""
        for traffic, count in Counter(classes).items():
            self.count_decision(traffic, 0, True, count)

    def count_no_room(self, traffic: TrafficClass, count: int = 1) -> None:
        """Count `count` sequences for whose drafts no rows or blocks were left."""
        self._counts[traffic].add_fallback(NO_ROOM, count)

    def restart(self, traffic: TrafficClass) -> None:
        """Discard what the breaker and the drift test know of a class. Its counts stay."""
        self.breaker.reset(traffic)
        self.drift.forget(traffic)

    def report(self) -> tuple[TrafficStatus, ...]:
        return tuple(counts.report(traffic, self.breaker.state(traffic)) for traffic, counts in self._counts.items())

    def first_alphas(self) -> dict[TrafficClass, float | None]:
        """The recent acceptance of the first drafts of every class. None if no draft was verified."""
        return {traffic: counts.first_alpha for traffic, counts in self._counts.items()}

    def _log(self, changes: list[AcceptanceChange]) -> list[AcceptanceChange]:
        for change in changes:
            method, category = change.traffic.method, change.traffic.shown_category
            self._counts[change.traffic].add_drift(change)
            logger.warning(
                "acceptance of %s drafts for %r changed from %.2f to %.2f: the depth policy restarts for this class",
                method,
                category,
                change.before,
                change.after,
                extra={"category": category, "method": method},
            )
        return changes


class TrialTraffic:
    """A draft on trial is learned in classes of its own. At the end of the trial they are discarded or adopted."""

    def __init__(self, proposers: "Mapping[str, Proposer]", traffic: TrafficStatistics) -> None:
        self._proposers, self._traffic = proposers, traffic
        self._on_trial: set[str] = set()
        """Methods all of whose sequences use the draft on trial now."""

    def class_of(self, sequence: Sequence) -> TrafficClass:
        """The traffic class of a sequence with the draft that is in use."""
        method = sequence.method
        traffic = TrafficClass(method, sequence.category, method in self._on_trial)
        refine = self._proposers[method].traits.traffic_class
        return traffic if refine is None else refine(traffic, sequence.id)

    def set(self, methods: Iterable[str], on_trial: bool) -> None:
        """Say whether all sequences of these methods use the draft on trial from now on."""
        if on_trial:
            self._on_trial.update(methods)
        else:
            self._on_trial.difference_update(methods)

    def forget(self, methods: Collection[str]) -> dict[TrafficClass, float]:
        """Discard what was learned on trial. Returns the classes to restart, with the new acceptance of each."""
        return {traffic: PRIOR_ALPHA for traffic, _ in self._alphas(methods)}

    def adopt(self, methods: Collection[str]) -> dict[TrafficClass, float]:
        """Let what was learned on trial hold for the draft in use. Returns the same as `forget`."""
        alphas = self._alphas(methods)
        return {traffic._replace(on_trial=False): alpha for traffic, alpha in alphas if alpha is not None}

    def _alphas(self, methods: Collection[str]) -> list[tuple[TrafficClass, float | None]]:
        """The classes on trial with the recent acceptance of their first drafts."""
        alphas = self._traffic.first_alphas()
        return [(traffic, alpha) for traffic, alpha in alphas.items() if traffic.on_trial and traffic.method in methods]


WINDOW_ROUNDS, WINDOW_STEPS = 16, 4
"""Least rounds (steps times sequences) and least steps of a window."""
NUM_WINDOWS = 16
"""Windows remembered of each method and scale of the load."""
MIN_WINDOWS = 4
"""Windows of each method before the first choice, and windows that end a trial."""
MARGIN = 0.03
"""Gain that another choice must have."""
ERRORS = 2.5
"""Standard errors that the gain must exceed."""
TRIAL_EVERY = 64
"""Sequences between two trials for each sequence of the last one, or of the load if that is more."""
UNSURE_EVERY = 16
"""The same until one method is clearly faster or each has all windows. Until then the faster method needs no margin."""
EARLY_EVERY = 2
"""The same while the first choice is open, or the method in use is slower than the other was."""
MAX_PATIENCE = 4
"""Factor of these while trials show that a method is clearly slower, or measure too little."""
MAX_TRIAL = 16
"""Most sequences of a trial for each sequence of the load."""


@dataclass(slots=True)
class _Measured:
    """The goodput of one method at one scale of the load."""

    windows: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_WINDOWS))
    steps: int = 0
    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Sum over sequences of the time of their steps, in the window that is not complete."""

    def add(self, batch: int, tokens: int, seconds: float) -> bool:
        """Returns whether a window is complete."""
        self.steps, self.rounds = self.steps + 1, self.rounds + batch
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + batch * seconds
        if self.steps < WINDOW_STEPS or self.rounds < WINDOW_ROUNDS:
            return False
        self.windows.append(self.tokens / self.seconds)
        self.steps, self.rounds, self.tokens, self.seconds = 0, 0, 0, 0.0
        return True

    @property
    def is_known(self) -> bool:
        return len(self.windows) >= MIN_WINDOWS

    @property
    def is_complete(self) -> bool:
        return len(self.windows) == NUM_WINDOWS

    @property
    def goodput(self) -> float:
        return fmean(self.windows)

    def beats(self, other: "_Measured") -> bool:
        """Whether it is faster by the margin, and by more than chance explains."""
        if not (self.is_known and other.is_known):
            return False
        gain = self.goodput - (1.0 + MARGIN) * other.goodput
        error = sqrt(sum(variance(method.windows) / len(method.windows) for method in (self, other)))
        return gain > 0.0 and self.goodput - other.goodput > ERRORS * error


@dataclass(slots=True)
class _Load:
    """What is known at one scale of the load."""

    measured: dict[str, _Measured]
    choice: str | None = None
    """The faster method. None until each method was measured."""
    is_sure: bool = False
    since_trial: int = 0
    """Sequences that started since the last trial."""
    trial_size: int = 0
    """Sequences of the last trial."""
    patience: int = 1


@dataclass(slots=True)
class _Trial:
    scale: int
    method: str
    most: int
    """Most sequences."""
    size: int = 0
    windows: int = 0


class DefaultMethod:
    """Chooses between two methods. `observe` gets the steps, `assign` returns the method of the sequences that start."""

    def __init__(self, methods: Seq[str]) -> None:
        """`methods` are the two methods. The first is used until each was measured."""
        if len(set(methods)) != 2:
            raise ValueError(f"a choice is between two methods, got {', '.join(methods) or 'none'}")
        self.methods = tuple(methods)
        self.method = self.methods[0]
        """The present choice, apart from trials. Any thread may read it."""
        self._loads: dict[int, _Load] = {}
        self._trial: _Trial | None = None
        self._around = 0
        """Load that the choice is for. It follows a load that halves or doubles, and not every sequence."""

    def goodput(self, method: str, load: int) -> float | None:
        """Tokens per second of one sequence by this method at about this load. None if it was not measured enough."""
        measured = self._at(load.bit_length()).measured[method]
        return measured.goodput if measured.is_known else None

    def observe(self, method: str, batch: int, tokens: int, seconds: float) -> None:
        """A step without prompts, whose `batch` sequences all had this method, committed `tokens` tokens. `seconds` is the time
        since the end of the previous step."""
        if method not in self.methods or batch < 1 or seconds <= 0.0:
            return
        scale, trial = batch.bit_length(), self._trial
        is_complete = self._at(scale).measured[method].add(batch, tokens, seconds)
        if is_complete and trial is not None and (trial.scale, trial.method) == (scale, method):
            trial.windows += 1

    def assign(self, count: int, load: int, available: Collection[str]) -> str:
        """The method of `count` sequences that start together. `load` is the number of running and waiting sequences, these
        included. `available` are the methods that can draft now."""
        usable = [method for method in self.methods if method in available]
        if len(usable) < 2:
            self._trial = None
            return usable[0] if usable else self.method
        if not self._around < 2 * load < 4 * self._around:
            self._around = load
        scale = self._around.bit_length()
        here = self._at(scale)
        self._end_trial(scale)
        self._choose_first(here)
        chosen = self.method = here.choice or self._nearest(scale)
        if self._trial is None and self._is_due(here, chosen):
            self._trial = _Trial(scale, self._other(chosen), MAX_TRIAL * load)
        if self._trial is not None:
            self._trial.size += count
            return self._trial.method
        here.since_trial += count
        return chosen

    def _end_trial(self, scale: int) -> None:
        """End the trial and choose if it has measured enough, takes too long, or the load has another scale now."""
        trial = self._trial
        if trial is None:
            return
        here = self._at(trial.scale)
        tried, before = here.measured[trial.method], here.measured[self._other(trial.method)]
        is_measured = trial.windows >= MIN_WINDOWS or (here.choice is None and tried.is_known)
        if not is_measured and trial.size < trial.most and trial.scale == scale:
            return
        self._trial = None
        here.since_trial, here.trial_size = 0, trial.size
        is_vain = before.beats(tried) or not tried.is_known
        here.patience = min(MAX_PATIENCE, 2 * here.patience) if is_vain else 1
        if not here.is_sure:
            here.choice = None
            self._choose_first(here)
        elif tried.beats(before):
            here.choice = trial.method

    def _choose_first(self, here: _Load) -> None:
        """Choose the faster method for every load that has no choice and at which each method was measured."""
        first, second = here.measured.values()
        if here.choice is None and first.is_known and second.is_known:
            here.choice = self.methods[second.goodput > first.goodput]
            is_complete = first.is_complete and second.is_complete
            here.is_sure = is_complete or first.beats(second) or second.beats(first)

    def _is_due(self, here: _Load, chosen: str) -> bool:
        """Whether the other method is to be tried."""
        used, other = here.measured[chosen], here.measured[self._other(chosen)]
        if not used.is_known:
            return False
        is_early = here.choice is None or other.beats(used)
        every = EARLY_EVERY if is_early else TRIAL_EVERY if here.is_sure else UNSURE_EVERY
        return here.since_trial >= every * here.patience * max(here.trial_size, self._around)

    def _nearest(self, scale: int) -> str:
        """The choice at the nearest load that has one; the present choice if none has."""
        chosen = [(abs(size - scale), size, load.choice) for size, load in self._loads.items() if load.choice]
        return min(chosen)[2] if chosen else self.method

    def _other(self, method: str) -> str:
        return self.methods[method == self.methods[0]]

    def _at(self, scale: int) -> _Load:
        load = self._loads.get(scale)
        if load is None:
            load = self._loads[scale] = _Load({method: _Measured() for method in self.methods})
        return load
