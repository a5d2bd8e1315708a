"""Decides whether a draft worker drafts ahead: the passes saved against the passes delayed.

Of a draft of K tokens, `num_ready` had been drafted when the target requested it: passes saved. A pass begun ahead must end
before a requested one can start: `delay` passes lost. That is about half a pass on a device of its own, and many where the
target occupies the device. Over recent rounds drafting ahead pays if

    sum num_ready  >=  max(sum delay, MIN_READY_SHARE sum K)

Otherwise the worker drafts on demand, and drafts ahead for a few rounds at an interval to measure again.
"""

from dataclasses import dataclass

MIN_READY_SHARE = 0.05
"""Share of the requested tokens that must be ready even without delays. Passes take power and slow a target on the same device,
which is not measured here."""
WINDOW = 64.0
"""Rounds in the decaying sums."""
MIN_ROUNDS = 32.0
"""Rounds in the sums before drafting ahead may pause."""
PROBE_ROUNDS, PROBE_INTERVAL = 4, 400
"""While paused, rounds drafted ahead out of each interval of rounds."""
MAX_DELAY = 2.0
"""Upper bound of a round's delay, in drafts on demand: one outlier does not outweigh the window."""


@dataclass(frozen=True, slots=True)
class AheadRound:
    """A round that was drafted ahead, at the time the target requested it; means over its sequences."""

    depth: float
    num_ready: float
    """Tokens drafted ahead."""
    ready_share: float
    """Share of drafts that were complete."""
    delay: float = 0.0
    """Wait for a pass begun ahead, in passes on demand."""


class DraftingAhead:
    """The decision for one target: `observe` each round drafted ahead, then call `next_round`."""

    __slots__ = ("_delay", "_depth", "_num_ready", "_passed", "_paused_share", "_ready_share", "_rounds")

    def __init__(self) -> None:
        self._paused_share: float | None = None
        self._passed = 0
        self._reset()

    def _reset(self) -> None:
        self._rounds = self._depth = self._num_ready = self._ready_share = self._delay = 0.0

    @property
    def paused_share(self) -> float | None:
        """Share of drafts that were ready in the last measurement; None while it drafts ahead."""
        return self._paused_share

    def observe(self, round_: AheadRound) -> None:
        keep = 1.0 - 1.0 / WINDOW
        self._rounds = self._rounds * keep + 1.0
        self._depth = self._depth * keep + round_.depth
        self._num_ready = self._num_ready * keep + round_.num_ready
        self._ready_share = self._ready_share * keep + round_.ready_share
        self._delay = self._delay * keep + min(round_.delay, MAX_DELAY * round_.depth)

    def next_round(self) -> bool:
        """Whether to draft ahead for the next round."""
        if self._paused_share is None:
            if self._rounds < MIN_ROUNDS or self._pays:
                return True
            self._pause()
        elif self._passed == PROBE_INTERVAL:
            if self._rounds and self._pays:
                self._paused_share = None
                return True
            self._pause()
        self._passed += 1
        return self._passed > PROBE_INTERVAL - PROBE_ROUNDS

    @property
    def _pays(self) -> bool:
        return self._num_ready >= max(self._delay, MIN_READY_SHARE * self._depth)

    def _pause(self) -> None:
        if self._rounds:
            self._paused_share = self._ready_share / self._rounds
        self._passed = 0
        self._reset()
