"""Decides which sequences join a step, how many prompt tokens it computes, and how many rows a pass is padded to. The engine
and the simulator share these rules.

On a CPU a step computes so few prompt tokens that sequences that decode do not wait long. On a GPU it computes whole pieces of
long prompts.
"""

from paceline.core.sequence import LEAST_PIECE_ROWS

CHEAP_ROWS = 512
"""Rows up to which a pass hides most of the work of prompts behind reading the weights."""
MIXED_PROMPT_ROWS = 8192
"""Most prompt rows of a mixed step: decoding sequences wait for them, 160 ms with an 8B model on an H200."""
MIN_PROMPT_ROWS = 16
"""Fewest prompt rows of a mixed step, the tokens of a cache block."""
DRAFT_PREFILL_SLOWDOWN = 3.0
"""Time of a draft prefill that runs in the steps of sequences that decode, over its time alone. It slows the steps down, and
the sequence does not draft until it is complete. With a factor of 1, 128 sequences of 128 tokens lost 7% on an H200."""

STEP_SECONDS = 0.2
"""Time that prompt tokens may take in a step in which other sequences decode."""
MIN_TOKENS = 32
"""Fewest prompt tokens of a step, and fewest scheduled tokens of a step that is measured."""
WEIGHT = 0.25
"""Weight of the newest measurement."""


def admits(need: int, free: int, running: int, most: int) -> bool:
    """Whether a waiting sequence may join: fewer than `most` sequences run, and the KV cache has as much free as it needs.

    `need` differs. The engine counts the blocks of the committed tokens and a spare one for each sequence, and preempts later
    if more are needed. The simulator counts the tokens of the whole request and never preempts.
    """
    return running < most and need <= free


def prompt_budget(num_decoding: int, num_waiting: int) -> int:
    """Prompt rows of the next mixed step of the graph executor, in which `num_decoding` sequences decode. `num_waiting` prompt
    rows wait in all."""
    rows = CHEAP_ROWS - num_decoding
    if num_waiting > rows:
        rows = num_waiting if num_waiting < MIXED_PROMPT_ROWS else MIXED_PROMPT_ROWS
    return rows if rows > MIN_PROMPT_ROWS else MIN_PROMPT_ROWS


def padded_size(count: int) -> int:
    """Sequences, or rows of a sequence, that a padded pass over `count` has room for."""
    return 1 << (count - 1).bit_length() if count <= 64 else -(-count // 64) * 64


def chunk_tokens(num_computed: int, num_left: int, budget: int, piece: int | None) -> int:
    """Tokens of the next chunk of a prompt of which `num_computed` tokens are computed and `num_left` are not, with room for
    `budget` in the step. `piece` is `ModelRunner.prompt_piece`. The chunk ends at a multiple of it if it has enough rows
    then."""
    if num_left <= budget or piece is None:
        return min(num_left, budget)
    whole = (num_computed + budget) // piece * piece - num_computed
    return whole if whole >= LEAST_PIECE_ROWS else budget


def ends_inside_piece(num_computed: int, num_left: int, budget: int, piece: int) -> bool:
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
        """Most prompt tokens of a step in which other sequences decode. None if no step was measured yet."""
        if not self._per_token:
            return None
        return max(MIN_TOKENS, int(self._seconds / self._per_token))
