"""A request in the simulation: its lengths, and the times at which things happened to it."""

from dataclasses import dataclass, field

from paceline.planning.simulator.prefix_cache import PromptBlocks


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """Written by the worker that serves it. Times are seconds of the virtual clock; negative: not yet."""

    id: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    prompt: PromptBlocks
    """Empty once the request has ended."""
    kind: int = 0
    """Kind of its text, by which drafts are accepted (`simulation/texts.py`)."""
    worker: int = -1
    length: int = field(init=False)
    """Tokens to have in the cache before the next token: the prompt, and the committed tokens of a request that moved."""
    left: int = field(init=False)
    """Tokens that the present worker generates."""
    cached: int = 0
    """Prompt tokens found in the cache of the first worker, as it reports them."""
    found: int = 0
    """Tokens found in the cache of the present worker."""
    computed: int = 0
    """Tokens of `length` in the cache by now, `found` included."""
    received: int = 0
    """Tokens of `length` that a prefill worker sent."""
    drafter: int = -1
    """Draft worker of the sequence."""
    began: float = 0.0
    """Progress of the batch when the sequence joined it."""
    generated: int = 0
    """Tokens of the present worker; kept by `SteppedBatch` only."""
    has_draft: bool = False
    """Whether the draft model has computed its prompt; kept by `SteppedBatch` only."""
    moves: int = 0
    """Times that the request continued on another worker."""
    first_token: float = -1.0
    finished: float = -1.0

    def __post_init__(self) -> None:
        self.length, self.left = self.prompt_tokens, self.output_tokens

    @property
    def num_uncomputed(self) -> int:
        """Rows of the prompt that are left."""
        return self.length - self.computed

    @property
    def priority(self) -> int:
        """Traces have no priorities, and no tenants."""
        return 0

    @property
    def tenant(self) -> str:
        return ""

    @property
    def weight(self) -> float:
        return 1.0

    def move(self, generated: int) -> None:
        """The worker is lost after `generated` tokens. Another worker generates the rest from the committed tokens."""
        self.moves += 1
        self.length += generated
        self.left -= generated
        self.computed = self.received = self.generated = 0
        self.has_draft = False
        self.worker = self.drafter = -1

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float:
        """Mean time per token after the first; 0 for an answer of one token."""
        return (self.finished - self.first_token) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0
