"""Prompt rows that the target computes for each committed token, while sequences keep ending and others take their places.

Drafts share the pass with these rows: beside many of them a pass is limited by arithmetic, and a row of a draft costs more than
in a step that only decodes. Faster decoding brings the prompts sooner too, so that their rows grow with the tokens of a step.
And a draft model computes the same prompts, which plain decoding does not need.
"""

import math
from collections import deque
from collections.abc import Sequence

from paceline.speculation.depth.policy import Candidate, StepObservation

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

    def rows_per_token(self, batch: Sequence[Candidate]) -> float:
        """Prompt rows expected for each token that `batch` commits."""
        if len(self._steps) < WINDOW_STEPS or self._num_quiet >= QUIET_STEPS:
            return 0.0
        seen = sum([rows for rows, _ in self._steps]) / sum([tokens for _, tokens in self._steps])
        return min(seen, _steady_rate(batch))


def _steady_rate(batch: Sequence[Candidate]) -> float:
    """Prompt rows per token if sequences like these come and go for ever; infinite if that is not known. A batch that has just
    begun computes its prompts in a few steps, and as many more do not follow."""
    prompt = output = 0
    for candidate in batch:
        if candidate.num_prompt == 0 or candidate.remaining is None:
            return math.inf
        prompt += candidate.num_prompt
        output += candidate.num_tokens - candidate.num_prompt + candidate.remaining
    return prompt / output if output else math.inf
