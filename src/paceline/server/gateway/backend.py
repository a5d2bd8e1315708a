"""What the gateway needs of whatever generates: one engine in this process, or a cluster of them."""

from typing import Protocol

from paceline.core.config import EngineConfig
from paceline.core.request import Request
from paceline.core.speculation import SpeculationFlags
from paceline.core.worker_status import ClusterStatus
from paceline.engine.loop import Listener, Tracer
from paceline.engine.stats.snapshot import EngineSnapshot
from paceline.models.tokenizer.tokenizer import Tokenizer


class Backend(Protocol):
    """`LLM` and `ClusterLLM` are backends. Every method may be called from any thread and waits for nothing."""

    config: EngineConfig
    tokenizer: Tokenizer

    @property
    def is_running(self) -> bool: ...

    @property
    def is_ready(self) -> bool:
        """Whether a request would be worked on now; a backend that runs may be without workers for a while."""
        ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def seats(self) -> int:
        """Sequences that run at once; further ones wait."""
        ...

    def submit(self, request: Request, listener: Listener) -> None:
        """Start a request or raise `InvalidRequest`; everything later goes to `listener`, on a thread of the backend's."""
        ...

    def cancel(self, request_id: str) -> None: ...

    def validate(self, request: Request) -> object:
        """Raise `InvalidRequest` if `submit` would. May take a while: it compiles grammars."""
        ...

    def validate_flags(self, flags: SpeculationFlags) -> None: ...

    def set_flags(self, flags: SpeculationFlags) -> None: ...

    @property
    def methods(self) -> tuple[str, ...]:
        """The ways to guess that a request or a flag may name."""
        ...

    def trace(self, tracer: Tracer) -> None:
        """Have the rounds of traced requests followed, where that happens in this process."""
        ...

    def snapshot(self) -> EngineSnapshot: ...

    def cluster_status(self) -> ClusterStatus | None:
        """None where everything is done in this process."""
        ...
