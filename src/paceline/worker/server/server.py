"""A target worker: serves the requests of gateways with a backend."""

import logging
from dataclasses import replace

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import PacelineError
from paceline.core.status import EngineStatus
from paceline.wire.codec import MalformedMessage
from paceline.wire.draft_messages import VERSION, Goodbye, Hello
from paceline.wire.gateway_messages import (
    Cancel,
    ChangeWeights,
    FromGateway,
    Heartbeat,
    HeartbeatRequest,
    Prefill,
    SetFlags,
    StatusReport,
    StatusRequest,
    Submit,
    SwapDraft,
    TokensRequest,
    Welcome,
    WorkerList,
)
from paceline.wire.lifecycle import Lifecycle
from paceline.wire.transport import Listener, Peer
from paceline.worker.server.backend import WRONG_EPOCH, Backend
from paceline.worker.server.gateways import GatewaySession, GatewaySessions
from paceline.worker.server.overload import WorkerOverload

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0
"""Part of a drain's time that is kept for the end: streams continue elsewhere, and the engine and the sockets close."""
MAX_JOBS = 8192
"""Requests per gateway, far above a gateway's own admission limit."""


class WorkerServer:
    """Serves gateways until `stop`. The thread of `run` owns the listener."""

    def __init__(
        self,
        name: str,
        listener: Listener[FromGateway],
        backend: Backend,
        clock: Clock | None = None,
        overload: WorkerOverload | None = None,
    ) -> None:
        """`overload` watches the memory of the process. If it is None, its limit is the memory of the machine."""
        self.name = name
        self._overload = overload or WorkerOverload(None)
        self.backend = backend
        self._listener = listener
        self._clock = clock or WallClock()
        self._lifecycle = Lifecycle(listener, self._clock)
        self._sessions = GatewaySessions(listener, self._clock)
        self._is_serving = backend.is_serving
        self._is_drain_announced = False
        backend.attach(self._lifecycle)

    @property
    def epoch(self) -> int:
        return self._lifecycle.epoch

    @property
    def address(self) -> str:
        return self._listener.address

    @property
    def weight_address(self) -> str:
        return self.backend.weight_address

    @property
    def is_loading(self) -> bool:
        return self.backend.is_loading

    def stop(self) -> None:
        """Thread-safe; `run` returns soon after."""
        self._lifecycle.stop()

    def drain(self, seconds: float) -> None:
        """Take no new requests. `run` returns when the running requests are finished, at most `seconds` from now. Gateways
        continue unfinished requests on other workers. It is thread-safe. A repeated call changes nothing."""
        self._lifecycle.drain(seconds)

    def run(self) -> None:
        """Blocks until `stop`, or until the worker has drained. Raises `WorkerFailed` if the backend fails."""
        try:
            while not self._lifecycle.is_stopping:
                self.backend.poll(self._clock.now())
                if self._overload.poll(self._clock.now()):
                    self._pass_on_longest()
                received = self._listener.receive(self.backend.idle_seconds)
                self._follow_backend()
                if received is not None and self._is_serving:
                    try:
                        self._handle(received.peer, received.message)
                    except Exception:  # No message may end the worker for the remaining clients
                        logger.exception("a message could not be handled")
                self._sessions.send_events()
                self.backend.announce(self._tell)
                self._drop_silent_gateways()
                if self._has_drained():
                    break
        finally:
            self._lifecycle.say_goodbye(self._sessions.by_peer, f"{self.name} is stopping")
            self._listener.close()
            self.backend.close()

    def _follow_backend(self) -> None:
        """End all sessions if the backend no longer serves. Begin a new epoch if it serves again."""
        is_serving = self.backend.is_serving
        if is_serving == self._is_serving:
            return
        self._is_serving = is_serving
        if is_serving:
            self._lifecycle.renew_epoch()
            return
        self._sessions.send_events()  # what arrived before counts
        self._lifecycle.say_goodbye(self._sessions.by_peer, f"the server of {self.name} does not answer")
        for peer in list(self._sessions.by_peer):
            self._drop(peer)

    def _tell(self, welcome: Welcome) -> None:
        """Tell all gateways what has changed, after the outputs before the change."""
        self._sessions.send_events()
        for peer in self._sessions.by_peer:
            self._listener.send(peer, welcome)

    def _has_drained(self) -> bool:
        """Whether the worker drains, and nothing is left to do or the time is over."""
        seconds = self._lifecycle.drain_seconds
        if seconds is None:
            return False
        if not self._is_drain_announced:
            self._is_drain_announced = True
            logger.info("draining: %d streams have %.1f s", self._sessions.num_running, seconds)
            for peer, session in self._sessions.by_peer.items():
                self._listener.send(peer, self._heartbeat(0, session))
        has_work = self.backend.has_other_work or self._sessions.has_work
        return not has_work or self._lifecycle.is_overdue(CLOSE_SECONDS)

    def _handle(self, peer: Peer, message: FromGateway | MalformedMessage) -> None:
        if isinstance(message, MalformedMessage):  # the listener counts it; it does not keep a gateway alive
            return
        session = self._sessions.heard(peer)
        match message:
            case Submit():
                self._submit(peer, session, message)
            case Cancel():
                for attempt in message.attempts:
                    self._cancel(session, attempt)
                self.backend.handle(peer, message)
            case HeartbeatRequest():
                self._listener.send(peer, self._heartbeat(message.nonce, session))
            case Hello():
                self._greet(peer, message)
            case StatusRequest():
                self._listener.send(peer, StatusReport(self.epoch, self.name, self._status()))
            case Prefill():
                self._prefill(peer, session, message)
            case SetFlags() | WorkerList() | SwapDraft() | ChangeWeights() | TokensRequest():
                answer = self.backend.handle(peer, message)
                if answer is not None:
                    self._listener.send(peer, answer)
            case Goodbye():
                self._drop(peer)

    def _greet(self, peer: Peer, hello: Hello) -> None:
        """Answer a `Hello`. Without the epoch of `Welcome` a gateway of another version can submit nothing."""
        text = f"{self.name} has protocol version {VERSION}, not {hello.version}: upgrade the older one"
        self._listener.send(peer, self.backend.welcome() if hello.version == VERSION else Goodbye(text))

    def _submit(self, peer: Peer, session: GatewaySession, message: Submit) -> None:
        if not self._accepts(session, message):
            return
        # The engine may still have another attempt of the request, and two gateways may use the same id
        request_id = f"{message.request.id}#{message.attempt}@{peer.hex()}"
        job = session.submit(message.attempt, replace(message.request, id=request_id))
        job.start(lambda: self.backend.submit(job, message))

    def _accepts(self, session: GatewaySession, message: Submit) -> bool:
        """Whether the worker, in this epoch, can take the request. If not, its failure is queued."""
        error = None
        if message.epoch != self.epoch:  # sent to the previous process at this address
            error = WRONG_EPOCH
        elif self._lifecycle.is_draining:  # sent before the gateway knew
            error = f"{self.name} is draining"
        elif self._overload.refuses:  # sent before the gateway knew
            error = f"the memory of {self.name} is almost full"
        elif len(session.jobs) >= MAX_JOBS:
            error = f"the limit of {MAX_JOBS} requests per gateway is reached"
        elif message.attempt in session.jobs:  # A failure would end the first submission
            logger.warning("a gateway repeats the attempt %d, which is ignored", message.attempt)
            return False
        if error is not None:
            session.fail(message.attempt, PacelineError(error))
        return error is None

    def _status(self) -> EngineStatus:
        status, symptoms = self.backend.status(), self._overload.symptoms
        return replace(status, symptoms=(*status.symptoms, *symptoms)) if symptoms else status

    def _pass_on_longest(self) -> None:
        """End the request with the most tokens. Its gateway continues it on another worker, or here when there is room."""
        running = [
            (sum(job.num_tokens) + len(job.request.prompt_ids), session, job)
            for session in self._sessions.by_peer.values()
            for job in session.jobs.values()
            if job.is_running
        ]
        if running:
            _, session, job = max(running, key=lambda entry: entry[0])
            logger.warning("the memory is full: request %s leaves this worker", job.request.id)
            self._cancel(session, job.attempt)
            session.fail(job.attempt, PacelineError(f"the memory of {self.name} is full"))

    def _cancel(self, session: GatewaySession, attempt: int) -> None:
        """Stop a request. An unknown or finished one is not an error."""
        job = session.jobs.pop(attempt, None)
        if job is not None:
            self.backend.cancel(job)

    def _prefill(self, peer: Peer, session: GatewaySession, message: Prefill) -> None:
        try:
            started = self.backend.handle(peer, message)
            self._listener.send(peer, started)  # if it is lost, the target cancels after its timeout
        except PacelineError as error:
            session.fail(message.attempt, error)
        except Exception as error:  # No request may end the worker for the remaining requests
            logger.exception("a prefill could not be started")
            session.fail(message.attempt, PacelineError(f"the prefill failed to start: {error!r}"))

    def _drop_silent_gateways(self) -> None:
        for peer in self._sessions.fail_silent():
            self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        session = self._sessions.by_peer.pop(peer)
        self.backend.drop(peer)
        for attempt in list(session.jobs):
            self._cancel(session, attempt)

    def _heartbeat(self, nonce: int, session: GatewaySession) -> Heartbeat:
        report = self.backend.report()
        return Heartbeat(
            nonce=nonce,
            epoch=self.epoch,
            steps=report.steps,
            is_busy=report.is_busy,
            running=report.running,
            waiting=report.waiting,
            kv_used=report.kv_used,
            kv_total=report.kv_total,
            prompt_tokens=report.prompt_tokens,
            loading=report.loading,
            step_seconds=report.step_seconds,
            attempts=session.attempts,
            is_draining=self._lifecycle.is_draining,
            is_overloaded=self._overload.refuses,
        )
