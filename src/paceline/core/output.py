"""What the engine hands out: values, one per sequence and step."""

from dataclasses import dataclass, field

from paceline.core.sequence import FinishReason, Origin


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token's log-probability under the model, and the most likely alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When a step began, had its drafts, and had verified them: seconds on the engine's clock."""

    began: float
    drafted: float
    verified: float


@dataclass(slots=True)
class StepOutput:
    """What one step added to one sequence. Never written to; it is not frozen because a step makes one for every sequence, and
    a frozen one takes three times as long to make."""

    request_id: str
    sequence_id: int
    choice: int
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    text: str
    drafted: int = 0
    accepted: int = 0
    """Of the drafted tokens; a token cut off by a stop still counts."""
    num_cached: int = 0
    """Prompt tokens that the prefix cache supplied."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    method: str = field(default="", compare=False)
    """How it is drafted for."""
    waited: float = field(default=0.0, compare=False)
    """Seconds from its arrival until it had a seat."""
    times: StepTimes | None = field(default=None, compare=False)
    """One value for all outputs of a step; None: they were made elsewhere."""


@dataclass(frozen=True, slots=True)
class SpeculationMetrics:
    """Per-request figures in the shape that load generators read."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: tuple[int, ...]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    """The deepest round the request may ask for."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished choice of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    origins: tuple[Origin, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    speculation: SpeculationMetrics


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request: its prompt and its `n` completions."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.completions[0].text
