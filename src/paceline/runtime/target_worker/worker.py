"""A target worker: serves the requests of gateways with an engine."""

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from paceline.cluster.health import StallDetector
from paceline.core.clock import Clock, WallClock
from paceline.core.errors import InvalidRequest, PacelineError
from paceline.engine.loop import EngineLoop
from paceline.runtime.draft_pool.control import PoolControl
from paceline.runtime.handoff.handoffs import Handoffs
from paceline.runtime.handoff.prefill_service import PrefillService
from paceline.runtime.kv_events.publisher import KvPublisher
from paceline.runtime.target_worker.draft_swaps import DraftSwaps
from paceline.runtime.target_worker.draft_symptoms import DraftSymptoms
from paceline.runtime.target_worker.flags import WorkerFlags
from paceline.runtime.target_worker.gateways import WRONG_EPOCH, GatewaySessions
from paceline.runtime.target_worker.jobs import GatewaySession
from paceline.runtime.target_worker.reports import WorkerReports
from paceline.runtime.target_worker.submissions import Submissions
from paceline.runtime.weights.manager import WeightManager
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
)
from paceline.runtime.wire.messages import Goodbye, Hello
from paceline.runtime.wire.target_messages import StatusReport
from paceline.runtime.wire.transport import Listener, Peer

logger = logging.getLogger(__name__)

IDLE_WAIT = 0.25
PAUSE_SECONDS = 1.0
"""Time between two turns of the worker's loop from which the process itself was suspended."""
HANG_SECONDS = 10.0
"""Time that a step may take beyond its predicted time before the worker exits. Gateways continue its streams much earlier."""
UNMEASURED_HANG_SECONDS = 600.0
"""The same for the first steps of a size, which may compile kernels."""


class Closeable(Protocol):
    def close(self) -> None: ...


class WorkerFailed(PacelineError):
    """The worker cannot continue; its process must exit and be restarted."""


class WorkerHung(WorkerFailed):
    """A step does not end. The engine's thread cannot be stopped: the process must exit at once."""


class TargetWorker:
    """Serves gateways until `stop`. The thread of `run` owns the listener; the engine has its own thread."""

    def __init__(
        self,
        name: str,
        loop: EngineLoop,
        listener: Listener[FromGateway],
        drafts: PoolControl | None = None,
        publisher: KvPublisher | None = None,
        weights: WeightManager | None = None,
        handoffs: Handoffs | None = None,
        prefill_service: PrefillService | None = None,
        tracing: Closeable | None = None,
        clock: Clock | None = None,
        weights_id: str = "",
        draft_swaps: DraftSwaps | None = None,
    ) -> None:
        """`handoffs` is a client of prefill workers. `prefill_service` computes or sends prompts for other targets. `tracing`
        is closed at the end. `weights_id` is the checksum of the weights and their formats. `draft_swaps` swaps the draft
        inside the engine."""
        self.name = name
        self.epoch = secrets.randbits(62)
        self._draft_swaps = draft_swaps
        self._loop = loop
        self._engine = loop.engine
        self._listener = listener
        self._drafts = drafts
        self._handoffs = handoffs
        self._prefill_service = prefill_service
        self._tracing = tracing
        self._publisher = publisher
        self._weights = weights
        if publisher is not None:
            self._engine.listen(publisher.put)
        self._clock = clock or WallClock()
        handoff_counts = handoffs or prefill_service
        self._reports = WorkerReports(
            name,
            self.epoch,
            weights_id,
            loop.engine,
            drafts,
            publisher,
            weights,
            handoff_counts,
            prefill_service,
            draft_swaps,
        )
        self._flags = WorkerFlags(loop)
        self._draft_symptoms = DraftSymptoms()
        self._stop = threading.Event()
        self._gateways = GatewaySessions(name, listener, self._clock)
        self._submissions = Submissions(loop, handoffs, self._gateways, listener.wake)
        self._commands: deque[Callable[[], None]] = deque()
        """Calls of other threads that the thread of `run` makes."""
        self._steps = StallDetector(HANG_SECONDS, UNMEASURED_HANG_SECONDS)
        self._last_turn: float | None = None

    @property
    def address(self) -> str:
        return self._listener.address

    @property
    def weight_address(self) -> str:
        """Address of its weight server. Empty without a weight server."""
        return "" if self._weights is None else self._weights.address

    @property
    def is_loading(self) -> bool:
        """Whether layers are missing, or the engine warms up."""
        return self._weights is not None and self._weights.progress is not None

    def run(self) -> None:
        """Blocks until `stop`. Raises `WorkerFailed` if the engine or the loading fails."""
        is_hung = False
        try:
            while not self._stop.is_set():
                received = self._listener.receive(IDLE_WAIT)
                if received is not None:
                    try:
                        self._handle(received.peer, received.message)
                    except Exception:  # No message may end the worker for the remaining clients
                        logger.exception("a message could not be handled")
                self._submissions.poll(self._clock.now())
                self._gateways.send_events()
                while self._commands:
                    self._commands.popleft()()
                is_hung = self._is_hung()
                if is_hung:
                    raise WorkerHung(f"a step of {self.name} does not end: the worker exits and is restarted")
                self._drop_silent_gateways()
                if self._weights is not None and self._weights.error is not None:
                    raise WorkerFailed(f"{self.name} failed to load its model: {self._weights.error}")
                if not self._loop.is_running:
                    raise WorkerFailed(f"the engine of {self.name} has stopped; see the log above")
                service = self._prefill_service
                if self._gateways.is_drained(service is not None and service.num_jobs > 0):
                    break
        finally:
            self._close(is_hung)

    def _close(self, is_hung: bool) -> None:
        self._gateways.say_goodbye(f"{self.name} is stopping")
        self._listener.close()
        self._submissions.close()
        if self._weights is not None:
            self._weights.close()  # first: a forward pass may wait for a layer
        if is_hung:  # All remaining requests wait for the engine's thread
            return
        if self._handoffs is not None:
            self._handoffs.close()
        self._loop.close()
        if self._prefill_service is not None:
            self._prefill_service.close()
        if self._drafts is not None:
            self._drafts.close()
        if self._tracing is not None:
            self._tracing.close()
        if self._publisher is not None:
            self._publisher.close()

    def stop(self) -> None:
        """Thread-safe; `run` returns soon after."""
        self._stop.set()
        self._listener.wake()

    def drain(self, seconds: float) -> None:
        """Take no new requests. `run` returns when the running requests are finished, at most `seconds` from now. Gateways
        continue unfinished requests on other workers. Thread-safe. A repeated call changes nothing."""
        self._commands.append(lambda: self._start_drain(seconds))
        self._listener.wake()

    def _start_drain(self, seconds: float) -> None:
        if self._gateways.is_draining:
            return
        self._gateways.start_drain(seconds)
        for peer, gateway in self._gateways.items():
            self._listener.send(peer, self._reports.heartbeat(0, gateway, is_draining=True))

    def _handle(self, peer: Peer, message: FromGateway | MalformedMessage) -> None:
        if isinstance(message, MalformedMessage):  # the listener counts it; it does not keep a gateway alive
            return
        gateway = self._gateways.heard(peer)
        match message:
            case Submit():
                if self._gateways.accepts(gateway, message, self.epoch):
                    self._submissions.submit(peer, gateway, message)
            case Cancel():
                for attempt in message.attempts:
                    self._submissions.cancel(gateway, attempt)
                    if self._prefill_service is not None:
                        self._prefill_service.cancel(peer, attempt)
            case HeartbeatRequest():
                if self._drafts is not None:
                    self._drafts.maintain()
                self._listener.send(peer, self._reports.heartbeat(message.nonce, gateway, self._gateways.is_draining))
            case Hello():
                self._gateways.greet(peer, message, self._reports.welcome)
            case SetFlags():
                self._flags.set(message.flags)
            case WorkerList():
                if self._drafts is not None:
                    self._drafts.set_workers(message.drafts)
                if self._handoffs is not None:
                    others = [peer for peer in message.peers if peer.name != self.name]
                    self._handoffs.set_workers(message.prefillers, others)
            case StatusRequest():
                self._listener.send(peer, self._status())
            case Prefill():
                self._prefill(peer, gateway, message)
            case SwapDraft():
                if self._draft_swaps is not None:
                    self._draft_swaps.start(message)
            case TokensRequest():
                self._listener.send(peer, self._submissions.reply_with_tokens(message))
            case Goodbye():
                self._drop(peer)

    def _prefill(self, peer: Peer, gateway: GatewaySession, message: Prefill) -> None:
        try:
            if self._prefill_service is None:
                raise InvalidRequest("this worker does not send cached blocks")
            if message.epoch != self.epoch:
                raise PacelineError(WRONG_EPOCH)
            if self._gateways.is_draining and self._prefill_service.computes:
                raise PacelineError(f"{self.name} is draining")
            started = self._prefill_service.start(peer, message)
            self._listener.send(peer, started)  # if it is lost, the target cancels after its timeout
        except PacelineError as error:
            gateway.fail(message.attempt, error)
        except Exception as error:  # No request may end the worker for the remaining requests
            logger.exception("a prefill could not be started")
            gateway.fail(message.attempt, PacelineError(f"the prefill failed to start: {error!r}"))

    def _drop_silent_gateways(self) -> None:
        for peer in self._gateways.fail_silent():
            self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        gateway = self._gateways.pop(peer)
        if self._prefill_service is not None:
            self._prefill_service.cancel_all(peer)
        self._submissions.cancel_all(gateway)

    def _status(self) -> StatusReport:
        snapshot = self._engine.status.snapshot()
        if self._flags.observe(snapshot, self._clock.now()) and self._drafts is None:
            self._draft_symptoms.observe(snapshot)
        own = () if self._drafts is not None else tuple(self._draft_symptoms.active)
        return self._reports.status((*own, *self._flags.symptoms))

    def _is_hung(self) -> bool:
        """Whether the current step has taken far longer than predicted."""
        now = self._clock.now()
        if self._last_turn is not None and now - self._last_turn > PAUSE_SECONDS:
            self._steps.forgive(now - self._last_turn)
        self._last_turn = now
        self._steps.observe(self._reports.progress(), now)
        return self._steps.is_stalled(now)
