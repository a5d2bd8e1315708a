"""When the host submits the next graph step: as late as the device allows, so that requests that arrive meanwhile are in it."""

from collections import deque
from collections.abc import Hashable

RECENT_STEPS = 8
"""Steps of one kind whose shortest time is expected of the next one."""
RECENT_SUBMITS = 32
"""Submits whose longest time is expected of the next one."""
LEAD_SHARE = 0.3
"""Least part of the running step that is left when the next one is submitted: a step may be shorter than expected."""
LEAD_SECONDS = 0.0005
"""The same in seconds, in addition to the time of a submit."""


class SubmitPacer:
    """Learns how long steps take on the device and how long the host needs to submit one.

    If a step is submitted as soon as its predecessor has started, a request that arrives then waits for the two steps. A step
    that is submitted just before the device needs it computes the request too.
    """

    def __init__(self) -> None:
        self._steps: dict[Hashable, deque[float]] = {}
        self._submits = {has_prompts: deque[float](maxlen=RECENT_SUBMITS) for has_prompts in (False, True)}

    def observe_step(self, kind: Hashable, seconds: float) -> None:
        """A step of this kind took `seconds` on the device. Steps of one kind take about the same time."""
        self._steps.setdefault(kind, deque(maxlen=RECENT_STEPS)).append(seconds)

    def observe_submit(self, has_prompts: bool, seconds: float) -> None:
        """The host needed `seconds` to schedule and submit a step."""
        self._submits[has_prompts].append(seconds)

    def seconds_to_spare(self, kind: Hashable, running_for: float, has_prompts: bool) -> float:
        """How long the host can wait before it submits the next step, with prompts or without, while a step of this kind has
        run for `running_for` seconds. 0 while either is not known."""
        steps, submits = self._steps.get(kind), self._submits[has_prompts]
        if not steps or not submits:
            return 0.0
        expected = min(steps)
        lead = max(LEAD_SHARE * expected, max(submits) + LEAD_SECONDS)
        return max(0.0, expected - lead - running_for)
