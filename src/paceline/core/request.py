"""What a caller asks for."""

from dataclasses import dataclass, field

from paceline.core.sampling import SamplingParams
from paceline.core.speculation import SpeculationParams


@dataclass(frozen=True, slots=True)
class Request:
    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    category: str = "default"
    """Kind of traffic: acceptance, depth and breaker are kept apart by it."""
    priority: int = 0
    cache_salt: str = ""
    """Requests with different salts never share a cached prefix."""
    committed: tuple[tuple[int, ...] | None, ...] = ()
    """Empty: start from the prompt. Otherwise one entry a choice: the output tokens that another engine has committed
    already, None if the choice is finished. What is left is generated as if nothing had happened, and nothing is said twice."""

    max_hit: int | None = None
    """Tokens that may come from the prefix cache; None: all that are there. Whoever needs more of a prompt than its keys and
    values has to have it computed."""

    trace: str = ""
    """The span it belongs to, as a W3C `traceparent`; empty: it is not traced."""

    @property
    def unfinished(self) -> tuple[int, ...]:
        """The choices that are to be generated."""
        done = self.committed or ((),) * self.sampling.n
        return tuple(choice for choice, tokens in enumerate(done) if tokens is not None)
