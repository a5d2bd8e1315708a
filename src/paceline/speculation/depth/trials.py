"""Whether drafting pays while sequences keep ending and others take their places, by measured throughput.

Costs of single steps do not show what drafting costs around them: sequences that join need a draft prefill and a step of the
host, and prompts cannot be computed beside drafts. Where drafting promises little, the policy therefore drafts for a while,
decodes plainly for a while, and continues with what was faster.
"""

from dataclasses import dataclass, field

WINDOW_STEPS = 32
"""Steps of one measurement."""
CONTESTED = 1.6
"""Expected advantage of drafting from which on it is not tried: no work around the steps takes that much time."""
SCALE = 1.4
"""Factor by which batches of one scale differ from its first."""
BUSY = 0.4
"""Sequences replaced for each token of a sequence, from which on drafting is expected to lose. While nothing drafts, new ones
join in steps that decode; a batch that drafts stops for them."""
FIRST_HOLD, LONGEST_HOLD = 8, 128
"""Windows for which the faster way is kept before the other is tried again: at first, and after it has won again and again."""


@dataclass(slots=True)
class _Scale:
    """Batches of about `batch` sequences."""

    batch: int
    is_drafting: bool = True
    """The way of the current window."""
    preferred: bool | None = None
    """The faster way; None: not measured yet."""
    rates: dict[bool, float] = field(default_factory=dict)
    """Tokens per second of the last window of drafting (True) and of plain decoding (False)."""
    is_quiet: bool = True
    """Whether no sequence was replaced in the last window."""
    num_held: int = 0
    hold: int = FIRST_HOLD
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    num_joined: int = 0
    num_ended: int = 0

    def restart_window(self) -> None:
        self.steps = self.tokens = self.num_joined = self.num_ended = 0
        self.seconds = 0.0

    @property
    def num_replaced(self) -> int:
        """Sequences that ended and whose places were taken. The first prompts of a batch replace none."""
        return min(self.num_joined, self.num_ended)

    @property
    def is_busy(self) -> bool:
        return self.num_replaced * self.batch > BUSY * self.tokens


class Trials:
    """Decides between drafting and plain decoding for each scale of batches."""

    def __init__(self) -> None:
        self._scales: list[_Scale] = []
        """The one in use last comes first, so that a batch between two scales does not alternate."""

    def allows_drafts(self, batch: int) -> bool:
        return self._scale(batch).is_drafting

    def restart(self) -> None:
        """There was no work: the next steps are another load, which is measured anew before it is judged by the last one."""
        for scale in self._scales:
            scale.restart_window()
            scale.is_drafting = scale.is_quiet = True

    def observe(
        self, batch: int, tokens: int, seconds: float, num_joined: int, num_ended: int, advantage: float | None
    ) -> None:
        """A step of `batch` decoding sequences committed `tokens`, `seconds` after the step before it. `num_joined` sequences
        completed their prompts in it, `num_ended` ended. `advantage`: expected speed of drafting over plain decoding."""
        scale = self._scale(batch)
        if advantage is None or not 1.0 < advantage < CONTESTED:
            self._scales.remove(scale)
            return
        scale.steps += 1
        scale.tokens += tokens
        scale.seconds += seconds
        scale.num_joined += num_joined
        scale.num_ended += num_ended
        if scale.steps < WINDOW_STEPS:
            return
        if scale.num_replaced == 0:  # the costs of single steps decide
            scale.is_drafting = scale.is_quiet = True
            scale.restart_window()
            return
        scale.rates[scale.is_drafting] = scale.tokens / scale.seconds
        is_busy, was_quiet = scale.is_busy, scale.is_quiet
        scale.is_quiet = False
        scale.restart_window()
        if scale.preferred is None and is_busy:
            scale.preferred = scale.is_drafting = False
            scale.hold = LONGEST_HOLD
        elif was_quiet and scale.preferred is not None:
            scale.is_drafting = scale.preferred
        else:
            self._choose(scale)

    def _scale(self, batch: int) -> _Scale:
        for scale in self._scales:
            if scale.batch <= SCALE * batch and batch <= SCALE * scale.batch:
                break
        else:
            scale = _Scale(batch)
            self._scales.append(scale)
        if scale is not self._scales[0]:
            self._scales.remove(scale)
            self._scales.insert(0, scale)
        return scale

    def _choose(self, scale: _Scale) -> None:
        """Which way the next window decodes."""
        way = scale.is_drafting
        if len(scale.rates) < 2:
            scale.is_drafting = not way
            return
        if way == scale.preferred:
            scale.num_held += 1
            if scale.num_held >= scale.hold:
                scale.is_drafting = not way
            return
        faster = scale.rates[True] > scale.rates[False]
        is_confirmed = faster == scale.preferred
        scale.hold = min(2 * scale.hold, LONGEST_HOLD) if is_confirmed else FIRST_HOLD
        scale.preferred = scale.is_drafting = faster
        scale.num_held = 0
