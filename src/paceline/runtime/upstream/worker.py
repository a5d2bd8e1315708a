"""A target worker whose engine is a server of another kind: gateways see no difference in the protocol."""

import itertools
import logging
import secrets
import threading
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import InvalidRequest, PacelineError
from paceline.core.speculation import SpeculationFlags
from paceline.core.status.engine import EngineStatus
from paceline.runtime.target_worker.gateways import GatewaySessions
from paceline.runtime.target_worker.jobs import GatewaySession, Submission
from paceline.runtime.upstream.bodies import check
from paceline.runtime.upstream.connection import UpstreamConnection
from paceline.runtime.upstream.kv_relay import KvRelay
from paceline.runtime.upstream.server_process import ServerProcess
from paceline.runtime.wire.codec import MalformedMessage
from paceline.runtime.wire.gateway_messages import (
    Cancel,
    FromGateway,
    HeartbeatRequest,
    Prefill,
    SetFlags,
    StatusRequest,
    Submit,
    SwapDraft,
    TokensRequest,
    WorkerList,
    check_limits,
)
from paceline.runtime.wire.messages import VERSION, Goodbye, Hello
from paceline.runtime.wire.target_messages import Heartbeat, StatusReport, TokensReply, Welcome
from paceline.runtime.wire.transport import Listener, Peer

logger = logging.getLogger(__name__)

IDLE_WAIT = 0.05
NO_METHOD = ""
"""Name of the speculation method: the server's own, if it has one."""


class UpstreamEnded(PacelineError):
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


class UpstreamWorker:
    """Serves gateways until `stop`. While the server does not answer, gateways get no answer either: they continue its streams
    elsewhere. When it answers again the worker has a new epoch."""

    weight_address = ""

    def __init__(
        self,
        name: str,
        model: UpstreamModel,
        connection: UpstreamConnection,
        listener: Listener[FromGateway],
        process: ServerProcess | None = None,
        relay: KvRelay | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`process` is the server, if this worker started it. `relay` publishes the server's KV events, if it has any."""
        self.name = name
        self.epoch = secrets.randbits(62)
        self._model, self._connection, self._listener = model, connection, listener
        self._process, self._relay = process, relay
        self._clock = clock or WallClock()
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self._gateways = GatewaySessions(name, listener, self._clock)
        self._is_serving = False
        self._drain_seconds: float | None = None
        """Seconds that the drain may take. None if no drain was requested."""
        self._connection.watch()

    @property
    def address(self) -> str:
        return self._listener.address

    @property
    def is_loading(self) -> bool:
        return False

    def run(self) -> None:
        """Blocks until `stop`. Raises `UpstreamEnded` if the server process exits."""
        try:
            while not self._stop.is_set():
                received = self._listener.receive(IDLE_WAIT)
                self._update_health()
                if received is not None and self._is_serving:
                    try:
                        self._handle(received.peer, received.message)
                    except Exception:  # No message may end the worker for the remaining clients
                        logger.exception("a message could not be handled")
                self._send_events()
                for peer in self._gateways.fail_silent():
                    self._drop(peer)
                if self._is_drained():
                    break
                if self._relay is not None:
                    self._relay.poll()
                if self._process is not None and self._process.exit_code is not None:
                    raise UpstreamEnded(f"the server of {self.name} exited with status {self._process.exit_code}")
        finally:
            self._gateways.say_goodbye(f"{self.name} is stopping")
            self._listener.close()
            self._connection.close()
            if self._relay is not None:
                self._relay.close()
            if self._process is not None:
                self._process.close()

    def stop(self) -> None:
        """Thread-safe; `run` returns soon after."""
        self._stop.set()
        self._listener.wake()

    def drain(self, seconds: float) -> None:
        """Take no new requests. `run` returns when the running requests are finished, at most `seconds` from now. Gateways
        continue unfinished requests on other workers. Thread-safe. A repeated call changes nothing."""
        self._drain_seconds = seconds
        self._listener.wake()

    def _is_drained(self) -> bool:
        """Whether a drain was requested and nothing is left to do, or its time is over."""
        if self._drain_seconds is None:
            return False
        if not self._gateways.is_draining:
            self._gateways.start_drain(self._drain_seconds)
            for peer, gateway in self._gateways.items():
                self._listener.send(peer, self._heartbeat(0, gateway))
        return self._gateways.is_drained()

    def _update_health(self) -> None:
        if self._connection.is_healthy == self._is_serving:
            return
        self._is_serving = self._connection.is_healthy
        logger.warning("%s %s", self._connection.url, "answers" if self._is_serving else "is lost")
        if not self._is_serving:
            self._send_events()  # what arrived before counts
            self._gateways.say_goodbye(f"the server of {self.name} does not answer")
            for gateway in self._gateways.values():
                for job in gateway.jobs.values():
                    self._connection.cancel(job.request_id)
            self._gateways.clear()
        else:
            self.epoch = secrets.randbits(62)

    def _handle(self, peer: Peer, message: FromGateway | MalformedMessage) -> None:
        if isinstance(message, MalformedMessage):
            return
        gateway = self._gateways.heard(peer)
        match message:
            case Submit():
                self._submit(peer, gateway, message)
            case Cancel():
                for attempt in message.attempts:
                    job = gateway.jobs.pop(attempt, None)
                    if job is not None:
                        self._connection.cancel(job.request_id)
            case HeartbeatRequest():
                self._listener.send(peer, self._heartbeat(message.nonce, gateway))
            case Hello():
                self._gateways.greet(peer, message, self._welcome)
            case StatusRequest():
                self._listener.send(peer, StatusReport(self.epoch, self.name, self._status()))
            case Prefill():
                gateway.fail(message.attempt, InvalidRequest("this worker does not send cached blocks"))
            case TokensRequest():  # the server keeps no tokens of streams
                self._listener.send(peer, TokensReply(message.number, None, []))
            case Goodbye():
                self._drop(peer)
            case SetFlags() if message.flags != SpeculationFlags():
                logger.warning("%s drafts by its own settings: the flags have no effect there", self._connection.url)
            case SetFlags() | WorkerList() | SwapDraft():  # it uses no other workers, and its server has the draft
                pass

    def _submit(self, peer: Peer, gateway: GatewaySession, message: Submit) -> None:
        if not self._gateways.accepts(gateway, message, self.epoch):
            return
        request = replace(message.request, id=f"{next(self._numbers)}")
        try:
            check_limits(request)
            check(request, self._model.can_disable_speculation)
        except PacelineError as error:
            gateway.fail(message.attempt, error)
            return
        job = gateway.jobs[message.attempt] = Submission(peer, message.attempt, request)
        extra: dict[str, Any] = {}
        if self._model.passes_speculation and not request.speculation.enabled:
            extra["speculation"] = {"enabled": False}
        self._connection.submit(request, self._model.name, extra, self._gateways.listener_of(job))

    def _send_events(self) -> None:
        """If a request failed, its remaining choices end with it."""
        self._gateways.send_events(lambda job: self._connection.cancel(job.request_id))

    def _drop(self, peer: Peer) -> None:
        for job in self._gateways.pop(peer).jobs.values():
            self._connection.cancel(job.request_id)

    @property
    def _num_running(self) -> int:
        return sum(job.num_unfinished for gateway in self._gateways.values() for job in gateway.jobs.values())

    def _heartbeat(self, nonce: int, gateway: GatewaySession) -> Heartbeat:
        load, running = self._connection.load, self._num_running
        return Heartbeat(
            nonce=nonce,
            epoch=self.epoch,
            steps=self._connection.num_chunks,
            is_busy=running > 0,
            running=max(running, load.running),
            waiting=load.waiting,
            kv_used=int(load.kv_use * self._model.kv_blocks),
            kv_total=self._model.kv_blocks,
            attempts=gateway.attempts,
            is_draining=self._gateways.is_draining,
        )

    def _status(self) -> EngineStatus:
        load = self._connection.load
        return EngineStatus(
            running=max(self._num_running, load.running),
            waiting=load.waiting,
            kv_used=int(load.kv_use * self._model.kv_blocks),
            kv_total=self._model.kv_blocks,
            preemptions=0,
            invalid_drafts=0,
            flags=SpeculationFlags(False, NO_METHOD, 0),
            traffic=(),
            generated=self._connection.num_tokens,
        )

    def _welcome(self) -> Welcome:
        return Welcome(
            version=VERSION,
            epoch=self.epoch,
            name=self.name,
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
