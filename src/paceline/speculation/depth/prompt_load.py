"""Prompt rows that the target computes for each committed token, while sequences keep ending and others take their places.

Drafts share the pass with these rows: beside many of them a pass is limited by arithmetic, and a row of a draft costs more than
in a step that only decodes. Faster decoding brings the prompts sooner too, so that their rows grow with the tokens of a step.
"""

from collections import deque

from paceline.speculation.depth.policy import StepObservation

WINDOW_STEPS = 16
"""Steps over which prompt rows and tokens are counted."""
QUIET_STEPS = 8
"""Steps without prompts after which none are expected: the prompts of a batch that has just begun fill a few steps only."""


class PromptLoad:
    def __init__(self) -> None:
        self._steps: deque[tuple[int, int]] = deque(maxlen=WINDOW_STEPS)
        """Prompt rows and committed tokens."""
        self._num_quiet = 0

    def observe(self, step: StepObservation) -> None:
        tokens = step.batch + sum([seen.accepted for seen in step.rounds])
        if tokens:
            self._steps.append((step.prefill_rows, tokens))
            self._num_quiet = 0 if step.prefill_rows else self._num_quiet + 1

    @property
    def rows_per_token(self) -> float:
        if len(self._steps) < WINDOW_STEPS or self._num_quiet >= QUIET_STEPS:
            return 0.0
        return sum([rows for rows, _ in self._steps]) / sum([tokens for _, tokens in self._steps])
