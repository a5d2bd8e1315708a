"""A target worker: serves the requests of gateways with an engine.

The reports of a target worker to gateways: its welcome, heartbeats and status.
"""

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import InvalidRequest, PacelineError
from paceline.core.status import Symptom
from paceline.drafting import PoolControl
from paceline.engine import Engine, EngineLoop
from paceline.model_files.tokenizer import fingerprint
from paceline.policy.health import StallDetector, StepProgress
from paceline.transfer.weights import WeightManager
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
    TokensRequest,
    Welcome,
    WorkerList,
)
from paceline.wire.kv_events import KvPublisher
from paceline.wire.transport import Listener, Peer
from paceline.worker.handoff import Handoffs, PrefillService
from paceline.worker.server.draft_swap import DraftSwaps
from paceline.worker.server.engine_backend import DraftSymptoms, Submissions, WorkerFlags
from paceline.worker.server.gateways import WRONG_EPOCH, GatewaySession, GatewaySessions


@dataclass(frozen=True, slots=True)
class WorkerReports:
    """Reads the parts of one worker. The thread of the worker calls it."""

    name: str
    epoch: int
    weights_id: str
    """Checksum of the weights and their formats."""
    engine: Engine
    drafts: PoolControl | None
    publisher: KvPublisher | None
    weights: WeightManager | None
    handoffs: Handoffs | PrefillService | None
    prefill_service: PrefillService | None
    draft_swaps: DraftSwaps | None

    def welcome(self) -> Welcome:
        engine, publisher = self.engine, self.publisher
        assert engine.tokenizer is not None
        limits = engine.validator.limits
        return Welcome(
            version=VERSION,
            epoch=self.epoch,
            name=self.name,
            vocabulary=fingerprint(engine.tokenizer).vocabulary,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=engine.scheduler.max_num_seqs,
            max_depth=limits.max_depth,
            methods=sorted(engine.speculator.proposers),
            default_method=engine.status.snapshot().flags.method or "",
            events_port=publisher.port if publisher else 0,
            replay_port=publisher.replay_port if publisher else 0,
            weights=self.weights_id,
            memory=None if self.prefill_service is None else self.prefill_service.cache_memory,
        )

    def heartbeat(self, nonce: int, gateway: GatewaySession, is_draining: bool) -> Heartbeat:
        snapshot, progress = self.engine.status.snapshot(), self.progress()
        return Heartbeat(
            nonce=nonce,
            epoch=self.epoch,
            steps=progress.steps,
            is_busy=progress.is_busy,
            running=snapshot.running,
            waiting=snapshot.waiting,
            kv_used=snapshot.kv_used,
            kv_total=snapshot.kv_total,
            prompt_tokens=self.engine.scheduler.num_prompt_tokens,
            loading=None if self.weights is None else self.weights.progress,
            step_seconds=progress.step_seconds,
            attempts=gateway.attempts,
            is_draining=is_draining,
        )

    def status(self, symptoms: tuple[Symptom, ...]) -> StatusReport:
        """`symptoms` are those that the worker itself has found."""
        snapshot, drafts = self.engine.status.snapshot(), self.drafts
        status = replace(
            snapshot,
            drafters=() if drafts is None else tuple(drafts.drafters()),
            symptoms=(*(() if drafts is None else drafts.symptoms()), *symptoms, *snapshot.audit.symptoms),
            handoffs=None if self.handoffs is None else self.handoffs.counts(),
            draft=None if self.draft_swaps is None else self.draft_swaps.status,
        )
        return StatusReport(self.epoch, self.name, status)

    def progress(self) -> StepProgress:
        """Of the engine's steps. A wait for a layer that is still loading is not a stall."""
        engine, is_loading = self.engine, self.weights is not None and self.weights.progress is not None
        return StepProgress(self.epoch, engine.num_steps, engine.has_work and not is_loading, engine.watch.step_seconds)


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
