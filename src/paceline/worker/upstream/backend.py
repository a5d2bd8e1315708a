"""A target worker whose engine is a server of another kind: gateways see no difference in the protocol.

KV events of another engine's server, published again under the worker's address and keys.

A `vllm serve` process that ends with its worker.
"""

import itertools
import json
import logging
import secrets
import socket
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.child import DEVNULL, ChildProcess
from paceline.core.clock import Clock, WallClock
from paceline.core.errors import InvalidConfig, InvalidRequest, PacelineError
from paceline.core.request import SpeculationFlags
from paceline.core.status import EngineStatus
from paceline.wire.codec import MalformedMessage
from paceline.wire.draft_messages import VERSION, Goodbye, Hello
from paceline.wire.gateway_messages import (
    Cancel,
    FromGateway,
    Heartbeat,
    HeartbeatRequest,
    Prefill,
    SetFlags,
    StatusReport,
    StatusRequest,
    Submit,
    SwapDraft,
    TokensReply,
    TokensRequest,
    Welcome,
    WorkerList,
    check_limits,
)
from paceline.wire.keys import Security
from paceline.wire.kv_events import KvPublisher
from paceline.wire.kv_subscriber import KvSubscriber
from paceline.wire.transport import Listener, Peer
from paceline.worker.server import GatewaySession, GatewaySessions, Submission
from paceline.worker.upstream.bodies import check
from paceline.worker.upstream.connection import UpstreamConnection


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


logger = logging.getLogger(__name__)

GRACE = 10.0
"""Seconds that the server has to exit after SIGTERM."""
EVENTS_ARGUMENT = "--kv-events-config"


class ServerProcess:
    """The process starts with the object. It gets SIGTERM when its worker ends, also by SIGKILL."""

    def __init__(self, executable: str, model: str, arguments: Sequence[str], publishes: bool = False) -> None:
        """With `publishes` the server sends KV events over sockets in a private folder, unless `arguments` configure them."""
        self.port = _free_port()
        self.kv_events: tuple[str, str] | None = None
        """Addresses of its KV events and of their replay. None if it publishes no events."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if publishes and not any(argument.startswith(EVENTS_ARGUMENT) for argument in arguments):
            self._folder = tempfile.TemporaryDirectory(prefix="paceline-kv-")
            self.kv_events = f"ipc://{self._folder.name}/events", f"ipc://{self._folder.name}/replay"
            events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.kv_events[0]}
            arguments = (*arguments, EVENTS_ARGUMENT, json.dumps({**events, "replay_endpoint": self.kv_events[1]}))
        command = [*executable.split(), model, "--host", "127.0.0.1", "--port", str(self.port), *arguments]
        logger.info("starting %s", " ".join(command))
        try:
            # In the worker's session, so that it also ends when the supervisor kills the worker
            self._process = ChildProcess(command, stdin=DEVNULL, own_session=False, ends_by_signal=True)
        except OSError as error:
            raise InvalidConfig(
                f"{command[0]} cannot be started: {error}; set upstream.executable to the command of vLLM"
            ) from error

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.exit_code

    def close(self) -> None:
        """Terminate it, and kill it if it does not exit in time."""
        self._process.stop(GRACE)
        if self._folder is not None:
            self._folder.cleanup()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


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
