"""Prompt rows that the target computes for each committed token, while sequences keep ending and others take their places.

Drafts share the pass with these rows: beside many of them a pass is limited by arithmetic, and a row of a draft costs more than
in a step that only decodes. Faster decoding brings the prompts sooner too, so that their rows grow with the tokens of a step.
"""

from collections import deque
from statistics import median

from paceline.speculation.depth.policy import StepObservation

WINDOW_STEPS = 15
"""Steps of which the median counts: the prompts of a batch that has just begun fill a few steps only."""


class PromptLoad:
    def __init__(self) -> None:
        self._rows: deque[float] = deque(maxlen=WINDOW_STEPS)

    def observe(self, step: StepObservation) -> None:
        tokens = step.batch + sum([seen.accepted for seen in step.rounds])
        if tokens:
            self._rows.append(step.prefill_rows / tokens)

    @property
    def rows_per_token(self) -> float:
        return median(self._rows) if len(self._rows) == WINDOW_STEPS else 0.0
