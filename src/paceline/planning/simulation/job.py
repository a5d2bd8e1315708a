"""A request in the simulation: its lengths, and the times at which things happened to it."""

from dataclasses import dataclass

from paceline.planning.simulation.prompt_blocks import PromptBlocks


@dataclass(slots=True, eq=False)
class Job:
    """Written by the worker that serves it. Times are seconds of the virtual clock; negative: not yet."""

    id: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    prompt: PromptBlocks
    worker: int = -1
    cached: int = 0
    """Prompt tokens found in the worker's cache."""
    computed: int = 0
    """Prompt tokens in the cache by now, `cached` included."""
    began: float = 0.0
    """Progress of the batch when the sequence joined it."""
    generated: int = 0
    """Tokens of the answer; kept by `SteppedBatch` only."""
    first_token: float = -1.0
    finished: float = -1.0

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float:
        """Mean time per token after the first; 0 for an answer of one token."""
        return (self.finished - self.first_token) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0
