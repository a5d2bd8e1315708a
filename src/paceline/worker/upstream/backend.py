"""The server of another engine behind a target worker: gateways see no difference in the protocol.

`KvRelay` publishes the KV events of that server again under the worker's address and keys.
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.core.clock import Clock
from paceline.core.errors import InvalidRequest
from paceline.core.output import OutputEvent, StepOutput
from paceline.core.request import SpeculationFlags
from paceline.core.status import EngineStatus
from paceline.wire.draft_messages import VERSION
from paceline.wire.gateway_messages import (
    FromTargetWorker,
    Prefill,
    SetFlags,
    Submit,
    TokensReply,
    TokensRequest,
    Welcome,
    check_limits,
)
from paceline.wire.keys import Security
from paceline.wire.kv_events import KvPublisher
from paceline.wire.kv_subscriber import KvSubscriber
from paceline.wire.lifecycle import Lifecycle
from paceline.wire.transport import Peer
from paceline.worker.server import BackendReport, Control, Submission, WorkerFailed
from paceline.worker.upstream.bodies import check
from paceline.worker.upstream.connection import UpstreamConnection
from paceline.worker.upstream.process import ServerProcess

logger = logging.getLogger(__name__)


class KvRelay:
    """Used by one thread, which calls `poll` often. Gateways see a worker that publishes its own events."""

    def __init__(
        self, name: str, host: str, address: str, replay_address: str | None, security: Security | None, clock: Clock
    ) -> None:
        """`host` is where to publish, as `tcp://host`. `address` is where the server publishes."""
        self._publisher = KvPublisher(f"{host}:0", f"{name}@{secrets.token_hex(8)}", security)
        self._subscriber = KvSubscriber(address, replay_address, self._publisher.put, clock)

    @property
    def port(self) -> int:
        return self._publisher.port

    @property
    def replay_port(self) -> int:
        return self._publisher.replay_port

    def poll(self) -> None:
        """Pass on what has arrived. Never waits."""
        self._subscriber.receive()

    def close(self) -> None:
        self._subscriber.close()
        self._publisher.close()


NO_METHOD = ""
"""Name of the speculation method: the server's own, if it has one."""


class UpstreamEnded(WorkerFailed):
    """The server process has exited; the worker's process must exit and be restarted."""


@dataclass(frozen=True, slots=True)
class UpstreamModel:
    """The model as gateways see it."""

    name: str
    """Name in the server's API."""
    vocabulary: str
    """Checksum of the tokenizer's vocabulary."""
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    kv_blocks: int
    """Blocks of 16 tokens that the KV cache is taken to hold."""
    can_disable_speculation: bool = False
    """Whether requests without speculation can be served as such."""
    passes_speculation: bool = False
    """Whether the server takes our `speculation` object."""


class UpstreamBackend:
    """A server of another engine. While it does not answer, gateways get no answer either, and continue its streams
    elsewhere."""

    idle_seconds = 0.05
    weight_address = ""
    is_loading = False
    has_other_work = False

    def __init__(
        self,
        name: str,
        model: UpstreamModel,
        connection: UpstreamConnection,
        process: ServerProcess | None = None,
        relay: KvRelay | None = None,
    ) -> None:
        """`name` is that of the worker. `process` is the server, if this worker started it. `relay` publishes the server's KV
        events, if it has any."""
        self._name, self._model, self._connection = name, model, connection
        self._process, self._relay = process, relay
        self._jobs: set[Submission] = set()
        """Submissions that may still run."""
        connection.watch()

    @property
    def is_serving(self) -> bool:
        return self._connection.is_healthy

    def attach(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def welcome(self) -> Welcome:
        return Welcome(
            version=VERSION,
            epoch=self._lifecycle.epoch,
            name=self._name,
            vocabulary=self._model.vocabulary,
            vocab_size=self._model.vocab_size,
            max_model_len=self._model.max_model_len,
            max_num_seqs=self._model.max_num_seqs,
            max_depth=0,
            methods=[],
            default_method=NO_METHOD,
            events_port=self._relay.port if self._relay else 0,
            replay_port=self._relay.replay_port if self._relay else 0,
        )

    def announce(self, tell: Callable[[Welcome], None]) -> None:
        """Nothing changes while the server runs, as far as its API shows."""

    def report(self) -> BackendReport:
        load, running = self._connection.load, self._num_running
        return BackendReport(
            steps=self._connection.num_chunks,
            is_busy=running > 0,
            running=max(running, load.running),
            waiting=load.waiting,
            kv_used=int(load.kv_use * self._model.kv_blocks),
            kv_total=self._model.kv_blocks,
        )

    def status(self) -> EngineStatus:
        report = self.report()
        return EngineStatus(
            running=report.running,
            waiting=report.waiting,
            kv_used=report.kv_used,
            kv_total=report.kv_total,
            preemptions=0,
            invalid_drafts=0,
            flags=SpeculationFlags(False, NO_METHOD, 0),
            traffic=(),
            generated=self._connection.num_tokens,
        )

    def submit(self, job: Submission, message: Submit) -> None:
        check_limits(job.request)
        check(job.request, self._model.can_disable_speculation)
        extra: dict[str, Any] = {}
        if self._model.passes_speculation and not job.request.speculation.enabled:
            extra["speculation"] = {"enabled": False}

        def listen(event: OutputEvent) -> None:
            job.put(event)
            if not isinstance(event, StepOutput):  # the remaining choices of the request end with it
                self._connection.cancel(job.request_id)

        self._jobs.add(job)
        self._connection.submit(job.request, self._model.name, extra, listen)

    def cancel(self, job: Submission) -> None:
        self._jobs.discard(job)
        self._connection.cancel(job.request_id)

    def handle(self, peer: Peer, message: Control) -> FromTargetWorker | None:
        match message:
            case Prefill():
                raise InvalidRequest("this worker does not send cached blocks")
            case TokensRequest():  # the server keeps no tokens of streams
                return TokensReply(message.number, None, [])
            case SetFlags() if message.flags != SpeculationFlags():
                logger.warning("%s drafts by its own settings: the flags have no effect there", self._connection.url)
            case _:  # it uses no other workers, and its server has the draft
                pass
        return None

    def drop(self, peer: Peer) -> None:
        """Nothing to end: its submissions are cancelled one by one."""

    def poll(self, now: float) -> None:
        if self._relay is not None:
            self._relay.poll()
        if self._process is not None and self._process.exit_code is not None:
            raise UpstreamEnded(f"the server of {self._name} exited with status {self._process.exit_code}")

    def close(self) -> None:
        self._connection.close()
        if self._relay is not None:
            self._relay.close()
        if self._process is not None:
            self._process.close()

    @property
    def _num_running(self) -> int:
        """Choices that the server generates."""
        self._jobs = {job for job in self._jobs if job.is_running}
        return sum(job.num_unfinished for job in self._jobs)
