"""Outputs of the engine: one value per sequence and step, and the finished generation."""

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core.errors import PacelineError
from paceline.core.sequence import FinishReason, Origin


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of the chosen token, and the most likely alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int = 1
    """Position of the token among all tokens by probability, from 1."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When a step began, had its drafts, and had verified them; seconds on the engine's clock."""

    began: float
    drafted: float
    verified: float


@dataclass(slots=True)
class StepOutput:
    """Tokens that one step added to one sequence. Treat it as frozen: it is not declared so because a step creates one per
    sequence, and creating a frozen one takes three times as long."""

    request_id: str
    sequence_id: int
    choice: int
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    text: str = ""
    """Text that the tokens add; empty as the engine returns it, because the receiver makes the text (`requests/text.py`)."""
    drafted: int = 0
    accepted: int = 0
    """Accepted draft tokens, including those cut off by a stop."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of the prompt tokens after the first; set in the first output of choice 0, if the request wants them."""
    finish_reason: FinishReason | None = None
    method: str = field(default="", compare=False)
    """Speculation method of the sequence."""
    waited: float = field(default=0.0, compare=False)
    """Seconds from arrival to the first scheduled step."""
    times: StepTimes | None = field(default=None, compare=False)
    """Times of the step, shared by all its outputs. None if the step ran in another process."""
    fingerprint: str = field(default="", compare=False)
    """Digest of the `SystemFingerprint` of the worker that generated it, as its gateway knows it. Empty if it is not known."""


OutputEvent = StepOutput | PacelineError
OutputListener = Callable[[OutputEvent], None]
"""Receives the outputs of one request on the engine's thread; it must not block. An error is the last event."""


@dataclass(frozen=True, slots=True)
class SpeculationMetrics:
    """Speculation figures of one request, in the format that load generators expect."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: tuple[int, ...]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    """Largest depth the request may use."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
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
    completions: tuple[CompletionOutput, ...]
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of the prompt tokens after the first, if `SamplingParams.prompt_logprobs` is set."""

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.completions[0].text
