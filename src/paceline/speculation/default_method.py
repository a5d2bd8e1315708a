"""Chooses the method of requests that name none, if an engine has an in-engine draft and a draft pool. Pure.

The rule compares the goodput that steps had with each method at about the present load. Goodput is the tokens per second of one
sequence, over windows of steps in which all sequences had that method. Nothing is inferred from parts of a step: the time that
a step needs in addition to drafts and passes differs between methods, since an in-engine draft runs inside CUDA graphs and a
pool does not.

Sequences that start together get one method, and later sequences get the same until the choice changes: a batch with two
methods cannot run as a graph. A share of consecutive sequences tries the other method. The choice for a load changes at the end
of a trial only, so that the two methods were measured lately, and by a margin and an error bound, so that equal methods do not
alternate.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, variance

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

    def __init__(self, methods: Sequence[str]) -> None:
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
