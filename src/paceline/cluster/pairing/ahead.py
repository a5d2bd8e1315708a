"""Whether a draft worker drafts ahead: what that saves against what it is in the way of.

Of a draft of K tokens `there` had been drafted when it was asked for: passes saved. A pass begun ahead has to end before what
is asked for can start: `delay` passes lost, half a one on a device of its own, many where the target holds the device that
the pass needs. Over recent rounds drafting ahead pays if

    sum there  >=  max(sum delay, FLOOR sum K)

Where it does not, drafts are made on demand, and a few rounds now and then show whether that has changed.
"""

from dataclasses import dataclass

FLOOR = 0.05
"""Share of the asked tokens that must be there even if nothing seems delayed: passes take power, and slow a target on the same
device, which nobody sees here."""
WINDOW = 64.0
"""Rounds that are remembered."""
ENOUGH = 32.0
"""Rounds, of those remembered, before drafting ahead is given up."""
PROBE, EVERY = 4, 400
"""At rest, so many rounds of so many are drafted ahead for."""
WORST = 2.0
"""A round counts no more delay than this many drafts on demand: one hiccup does not outweigh the window."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A round that was drafted ahead for, as it was found when it was asked for; means over its sequences."""

    depth: float
    there: float
    """Tokens of it that had been drafted ahead."""
    ready: float
    """Share of its drafts that were complete."""
    delay: float = 0.0
    """Passes, each as long as one on demand, for which it waited behind one that was begun ahead."""


class DraftingAhead:
    """For one target: `observe` each round that was drafted ahead for, then ask `next_round` about the one that follows."""

    __slots__ = ("_delay", "_depth", "_passed", "_ready", "_resting", "_rounds", "_there")

    def __init__(self) -> None:
        self._resting: float | None = None
        self._passed = 0
        self._forget()

    def _forget(self) -> None:
        self._rounds = self._depth = self._there = self._ready = self._delay = 0.0

    @property
    def resting(self) -> float | None:
        """Share of drafts that were ready when last tried. None: it is not given up."""
        return self._resting

    def observe(self, asked: Asked) -> None:
        keep = 1.0 - 1.0 / WINDOW
        self._rounds = self._rounds * keep + 1.0
        self._depth = self._depth * keep + asked.depth
        self._there = self._there * keep + asked.there
        self._ready = self._ready * keep + asked.ready
        self._delay = self._delay * keep + min(asked.delay, WORST * asked.depth)

    def next_round(self) -> bool:
        """Whether to draft ahead for it."""
        if self._resting is None:
            if self._rounds < ENOUGH or self._pays:
                return True
            self._rest()
        elif self._passed == EVERY:
            if self._rounds and self._pays:
                self._resting = None
                return True
            self._rest()
        self._passed += 1
        return self._passed > EVERY - PROBE

    @property
    def _pays(self) -> bool:
        return self._there >= max(self._delay, FLOOR * self._depth)

    def _rest(self) -> None:
        if self._rounds:
            self._resting = self._ready / self._rounds
        self._passed = 0
        self._forget()
