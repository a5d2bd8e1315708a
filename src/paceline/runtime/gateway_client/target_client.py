"""The interface of a target worker, as the gateway sees it."""

from typing import Protocol

from paceline.core.config import EngineConfig
from paceline.core.output import OutputListener
from paceline.core.request import Request, ValidatedRequest
from paceline.core.speculation import SpeculationFlags
from paceline.core.worker_status import ClusterStatus, EngineStatus
from paceline.models.tokenizer.tokenizer import Tokenizer


class TargetClient(Protocol):
    """Implemented by `LocalTarget`, an engine in this process, and by `ClusterTarget`, the target workers of a cluster.

    Every method is thread-safe. No method but `close` blocks.
    """

    config: EngineConfig
    tokenizer: Tokenizer

    @property
    def is_running(self) -> bool:
        """False once the client is closed or its engine has failed."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether a request would start now. A running client may have no ready worker for a while."""
        ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once; further sequences wait."""
        ...

    @property
    def methods(self) -> tuple[str, ...]:
        """Speculation methods that a request or a flag may name."""
        ...

    def validate(self, request: Request) -> ValidatedRequest:
        """The request with its seed, or `InvalidRequest`. Compiling a grammar may take a while."""
        ...

    def submit(self, request: Request, listener: OutputListener) -> None:
        """Start a request, or raise `InvalidRequest`. `listener` receives the outputs, on a thread of the client."""
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a request; its listener receives nothing more. An unknown or finished request is not an error."""
        ...

    def validate_flags(self, flags: SpeculationFlags) -> None:
        """Raise `InvalidRequest` if `set_flags` would."""
        ...

    def set_flags(self, flags: SpeculationFlags) -> None:
        """Apply the operator's flags to running and new requests."""
        ...

    def engine_status(self) -> EngineStatus:
        """Status of the engine, or of all target workers as one engine."""
        ...

    def cluster_status(self) -> ClusterStatus | None:
        """Status of every worker; None without a cluster."""
        ...

    def close(self) -> None:
        """Cancel running requests and release the engine, or disconnect from the workers."""
        ...
