"""What a worker's server needs of the engine behind it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from paceline.core.errors import PacelineError
from paceline.core.status import EngineStatus
from paceline.wire.gateway_messages import (
    Cancel,
    ChangeWeights,
    FromTargetWorker,
    LoadProgress,
    Prefill,
    SetFlags,
    Submit,
    SwapDraft,
    TokensRequest,
    Welcome,
    WorkerList,
)
from paceline.wire.lifecycle import Lifecycle
from paceline.wire.transport import Peer
from paceline.worker.server.gateways import Submission

WRONG_EPOCH = "the message is for another epoch of this worker"

Control: TypeAlias = SetFlags | WorkerList | SwapDraft | ChangeWeights | Prefill | TokensRequest | Cancel
"""Messages that a backend handles itself."""


class WorkerFailed(PacelineError):
    """The worker cannot continue; its process must exit and be restarted."""


@dataclass(frozen=True, slots=True)
class BackendReport:
    """Fields of a heartbeat that the backend knows."""

    steps: int
    is_busy: bool
    running: int
    waiting: int
    kv_used: int
    kv_total: int
    prompt_tokens: int = 0
    loading: LoadProgress | None = None
    step_seconds: float | None = None


class Backend(Protocol):
    """Generates for one `WorkerServer`, whose thread calls all methods. No call waits."""

    idle_seconds: float
    """Longest time between two calls of `poll`."""

    @property
    def weight_address(self) -> str:
        """Address of its weight server. It is empty without a weight server."""
        ...

    @property
    def is_loading(self) -> bool:
        """Whether layers are missing, or the engine warms up."""
        ...

    @property
    def is_serving(self) -> bool:
        """False while gateways must get no answer, so that they continue their streams elsewhere. The worker has a new epoch
        when it serves again."""
        ...

    @property
    def has_other_work(self) -> bool:
        """Whether a drain waits for work besides the submissions."""
        ...

    def attach(self, lifecycle: Lifecycle) -> None:
        """Called once, before any other method."""
        ...

    def welcome(self) -> Welcome: ...

    def status(self) -> EngineStatus: ...

    def report(self) -> BackendReport: ...

    def submit(self, job: Submission, message: Submit) -> None:
        """Start a request. Its outputs and its error go to `job.put`, from any thread. Raises what the request is refused
        with."""
        ...

    def cancel(self, job: Submission) -> None:
        """Stop a request that is no longer a submission of its session. A finished request is no error."""
        ...

    def handle(self, peer: Peer, message: Control) -> FromTargetWorker | None:
        """Returns the answer. None if the message has no answer. Only `Prefill` may raise."""
        ...

    def drop(self, peer: Peer) -> None:
        """End what a gateway or target that is gone has started with `handle`."""
        ...

    def poll(self, now: float) -> None:
        """Do what is due. Raises `WorkerFailed` if the backend cannot continue."""
        ...

    def announce(self, tell: Callable[[Welcome], None]) -> None:
        """If gateways must be told of a change, `tell` sends them what was output before, then the new `Welcome`."""
        ...

    def close(self) -> None: ...
