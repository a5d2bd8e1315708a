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
