"""How many prompt tokens a step computes: on a CPU, so few that sequences that decode do not wait long; on a GPU, whole pieces
of long prompts."""

from paceline.kernels.layout import LEAST_PIECE_ROWS

STEP_SECONDS = 0.2
"""Time of prompt tokens in one step beside sequences that decode."""
MIN_TOKENS = 32
"""Fewest prompt tokens of a step, and fewest scheduled tokens of a step that is measured."""
WEIGHT = 0.25
"""Weight of the newest measurement."""


def chunk_tokens(num_computed: int, num_left: int, budget: int, piece: int | None) -> int:
    """Tokens of the next chunk of a prompt of which `num_computed` tokens are computed and `num_left` are not, with room for
    `budget` in the step. `piece`: that of `ModelRunner.prompt_piece`. The chunk ends at a multiple of it if it has enough rows
    then."""
    if num_left <= budget or piece is None:
        return min(num_left, budget)
    whole = (num_computed + budget) // piece * piece - num_computed
    return whole if whole >= LEAST_PIECE_ROWS else budget


def cuts_piece(num_computed: int, num_left: int, budget: int, piece: int) -> bool:
    """Whether the next chunk of a long prompt would end inside a piece. The parameters are those of `chunk_tokens`."""
    if num_left <= budget or num_left < LEAST_PIECE_ROWS:
        return False
    return (num_computed + chunk_tokens(num_computed, num_left, budget, piece)) % piece != 0


class PromptPacer:
    """Measures the time of a scheduled token in steps with many of them. It matters on a CPU: a GPU computes thousands in that
    time."""

    def __init__(self, seconds: float = STEP_SECONDS) -> None:
        self._seconds = seconds
        self._per_token: float | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step computed `num_tokens` scheduled tokens in this time."""
        if num_tokens < MIN_TOKENS:
            return
        measured, last = seconds / num_tokens, self._per_token
        self._per_token = measured if last is None else (1.0 - WEIGHT) * last + WEIGHT * measured

    @property
    def max_tokens(self) -> int | None:
        """Most prompt tokens of a step beside sequences that decode; None: not known yet."""
        if not self._per_token:
            return None
        return max(MIN_TOKENS, int(self._seconds / self._per_token))
