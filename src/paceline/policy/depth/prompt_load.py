"""Prompt rows that the target computes for each committed token, while sequences keep ending and new ones take their places.

Drafts share the pass with these rows: a pass with many prompt rows is limited by arithmetic, and a row of a draft costs more
than in a step that only decodes. Faster decoding brings the prompts sooner too, so that their rows grow with the tokens of a
step. And a draft model computes the same prompts, which plain decoding does not need.

Sequences that began together end together, so that prompts come in bursts. How deep the next step drafts depends on the prompts
of the last few steps. Whether a batch drafts at all depends on those of a whole generation of texts: a batch that starts to
draft between two bursts pays for the draft prefill of all its sequences, and the next burst takes the gain.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

from paceline.policy.depth.observation import DepthCandidate, StepObservation

WINDOW_STEPS = 16
"""Steps over which prompt rows and tokens are counted."""
QUIET_STEPS = 8
"""Steps without prompts after which none are expected: the prompts of a batch that has just begun fill a few steps only."""


_GROWTH = 8
"""Inverse share by which a growing batch grows."""
GENERATION_STEPS = 4096
"""Steps within which a generation of texts is counted, at most."""


SHARED_ROWS = 1024
"""Prompt rows of a step that count for a whole generation. More of them take as long with drafts as without: the pass is
limited by arithmetic in either case."""
MANY_ROWS = 2048
"""Number of prompt rows in a step from which the slots of a GPU compute no draft prefill, and most batches draft nothing. The
pass is limited by arithmetic: drafts gain little more than in a later step, and the prompts would wait for them."""
_FEW_SEQUENCES = 16
"""Batches of up to this many sequences draft with any number of prompt rows in the step, since their drafts are a small part of
it."""


def may_draft_with_prompts(prompt_rows: int, num_sequences: int) -> bool:
    """Whether a batch in the slots of a GPU may draft in a step that also computes `prompt_rows` prompt rows."""
    return prompt_rows < MANY_ROWS or num_sequences <= _FEW_SEQUENCES


class PromptLoad:
    def __init__(self) -> None:
        self._steps: deque[tuple[int, int]] = deque(maxlen=WINDOW_STEPS)
        """Prompt rows and committed tokens."""
        self._num_quiet = 0
        self._expected = self._last_rows = 0
        self._all_rows, self._all_tokens = [0], [0]  # sums up to each step

    def observe(self, step: StepObservation) -> None:
        tokens = step.batch + sum([seen.accepted for seen in step.rounds])
        self._last_rows = step.prefill_rows
        self._all_rows.append(self._all_rows[-1] + min(step.prefill_rows, SHARED_ROWS))
        self._all_tokens.append(self._all_tokens[-1] + tokens)
        if len(self._all_rows) > 2 * GENERATION_STEPS:
            del self._all_rows[:GENERATION_STEPS], self._all_tokens[:GENERATION_STEPS]
        if tokens:
            self._steps.append((step.prefill_rows, tokens))
            self._num_quiet = 0 if step.prefill_rows else self._num_quiet + 1

    def expect(self, rows: int) -> None:
        """Prompt rows that are still to be computed."""
        self._expected = rows

    def is_growing(self, batch: Sequence[DepthCandidate]) -> bool:
        """Whether prompts make `batch` larger by more than an eighth if none of its sequences ends. The prompts are the
        expected ones. For more than a few sequences, those of the last step count too, since more may arrive at any time."""
        rows = self._expected if len(batch) <= _FEW_SEQUENCES else max(self._expected, self._last_rows)
        return rows > 0 and _GROWTH * rows > _lengths(batch)[0] > 0

    def rows_per_token(self, batch: Sequence[DepthCandidate]) -> float:
        """Prompt rows expected for each token that `batch` commits in the next steps."""
        if len(self._steps) < WINDOW_STEPS or self._num_quiet >= QUIET_STEPS:
            return 0.0
        seen = sum([rows for rows, _ in self._steps]) / sum([tokens for _, tokens in self._steps])
        return min(seen, _steady_rate(*_lengths(batch)))

    def lasting_rows_per_token(self, batch: Sequence[DepthCandidate]) -> float:
        """Prompt rows for each token while as many tokens were committed as `batch` generates from its first to its last. 0 if
        the lengths of the texts are not known."""
        prompt, output = _lengths(batch)
        if not output:
            return 0.0
        first = max(0, bisect_right(self._all_tokens, self._all_tokens[-1] - output) - 1)
        rows, tokens = self._all_rows[-1] - self._all_rows[first], self._all_tokens[-1] - self._all_tokens[first]
        return min(rows / max(1, tokens), _steady_rate(prompt, output))


def _lengths(batch: Sequence[DepthCandidate]) -> tuple[int, int]:
    """Tokens of the prompts and of the outputs, complete, of these sequences; 0 if one is not known."""
    prompt = output = 0
    for candidate in batch:
        if candidate.num_prompt == 0 or candidate.remaining is None:
            return 0, 0
        prompt += candidate.num_prompt
        output += candidate.num_tokens - candidate.num_prompt + candidate.remaining
    return prompt, output


def _steady_rate(prompt: int, output: int) -> float:
    """Prompt rows per token if sequences like these come and go for ever; infinite if that is not known. A batch that has just
    begun computes its prompts in a few steps, and as many more do not follow."""
    return prompt / output if output else math.inf
