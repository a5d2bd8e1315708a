"""A target worker: an engine that gateways talk to over the wire."""

import logging
import secrets
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import InvalidRequest, PacelineError
from paceline.core.output import OutputEvent
from paceline.core.speculation import SpeculationFlags
from paceline.engine.loop import EngineLoop
from paceline.models.drafts.compatibility import fingerprint
from paceline.runtime.draft_pool.control import PoolControl
from paceline.runtime.handoff.handoffs import Handoffs
from paceline.runtime.handoff.prefill_service import PrefillDesk
from paceline.runtime.kv_events.publisher import KvPublisher
from paceline.runtime.target_worker.jobs import GatewayJobs, Job
from paceline.runtime.target_worker.kv_pressure import KvPressure
from paceline.runtime.weights.manager import WeightManager
from paceline.runtime.wire.codec import MalformedMessage
from paceline.runtime.wire.messages import VERSION, Goodbye, Hello
from paceline.runtime.wire.stream_messages import (
    Cancel,
    FromGateway,
    Heartbeat,
    HeartbeatRequest,
    Prefill,
    SetFlags,
    StatusReport,
    StatusRequest,
    Submit,
    Welcome,
    WorkerList,
    check_limits,
)
from paceline.runtime.wire.transport import Listener, Peer

logger = logging.getLogger(__name__)

SILENCE = 10.0
"""Seconds after which a gateway that says nothing is taken for dead."""
IDLE_WAIT = 0.25
MAX_JOBS = 8192
"""Requests of one gateway; its own admission keeps far below."""


class Closing(Protocol):
    def close(self) -> None: ...


class WorkerFailed(PacelineError):
    """The worker's engine broke: the process should end, and be started again."""


class TargetWorker:
    """Serves gateways until it is told to stop. `run` owns the listener; the engine has its own thread."""

    def __init__(
        self,
        name: str,
        loop: EngineLoop,
        listener: Listener[FromGateway],
        drafts: PoolControl | None = None,
        publisher: KvPublisher | None = None,
        weights: WeightManager | None = None,
        handoffs: Handoffs | None = None,
        desk: PrefillDesk | None = None,
        tracing: Closing | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`handoffs`: prompts may be computed by prefill workers. `desk`: this is one of them. `tracing`: to close at the
        end."""
        self.name = name
        self.epoch = secrets.randbits(62)
        self._loop = loop
        self._engine = loop.engine
        self._listener = listener
        self._drafts = drafts
        self._handoffs = handoffs
        self._requests: Handoffs | EngineLoop = handoffs or loop
        self._desk = desk
        self._tracing = tracing
        self._publisher = publisher
        self._weights = weights
        if publisher is not None:
            self._engine.listen(publisher.put)
        self._clock = clock or WallClock()
        self._flags = SpeculationFlags()
        self._pressure = KvPressure()
        self._stop = threading.Event()
        self._numbers = iter(range(2**62))
        self._gateways: dict[Peer, GatewayJobs] = {}
        self._news: deque[tuple[Job, OutputEvent]] = deque()

    @property
    def address(self) -> str:
        return self._listener.address

    @property
    def weight_address(self) -> str:
        """Where it gives its weights to others; empty: nowhere."""
        return "" if self._weights is None else self._weights.address

    def run(self) -> None:
        """Blocks until `stop`. Raises `WorkerFailed` if the engine breaks."""
        try:
            while not self._stop.is_set():
                received = self._listener.receive(IDLE_WAIT)
                if received is not None:
                    self._hear(received.peer, received.message)
                self._tell()
                self._drop_silent()
                if self._weights is not None and self._weights.error is not None:
                    raise WorkerFailed(f"{self.name} cannot load its model: {self._weights.error}")
                if not self._loop.is_running:
                    raise WorkerFailed(f"the engine of {self.name} has stopped; the log above says why")
        finally:
            for peer in self._gateways:
                self._listener.send(peer, Goodbye(f"{self.name} is stopping"))
            self._listener.close()
            if self._weights is not None:
                self._weights.close()  # first: a pass may be waiting for a layer
            if self._handoffs is not None:
                self._handoffs.close()
            self._loop.close()
            if self._desk is not None:
                self._desk.close()
            if self._drafts is not None:
                self._drafts.close()
            if self._tracing is not None:
                self._tracing.close()
            if self._publisher is not None:
                self._publisher.close()

    def stop(self) -> None:
        """From any thread; `run` returns soon after."""
        self._stop.set()
        self._listener.wake()

    def _hear(self, peer: Peer, message: FromGateway | MalformedMessage) -> None:
        if isinstance(message, MalformedMessage):  # counted by the listener; whoever it was is not taken for alive
            return
        gateway = self._gateways.setdefault(peer, GatewayJobs())
        gateway.heard = self._clock.now()
        match message:
            case Submit():
                self._submit(peer, gateway, message)
            case Cancel():
                for attempt in message.attempts:
                    self._withdraw(gateway, attempt)
                    if self._desk is not None:
                        self._desk.withdraw(peer, attempt)
            case HeartbeatRequest():
                if self._drafts is not None:
                    self._drafts.maintain()
                self._listener.send(peer, self._pulse(message.nonce))
            case Hello():
                self._listener.send(peer, self._welcome())
            case SetFlags():
                self._change(message)
            case WorkerList():
                if self._drafts is not None:
                    self._drafts.set_workers(message.drafts)
                if self._handoffs is not None:
                    others = [one for one in message.peers if one.name != self.name]
                    self._handoffs.set_workers(message.prefillers, others)
            case StatusRequest():
                self._listener.send(peer, self._report())
            case Prefill():
                self._prefill(peer, gateway, message)
            case Goodbye():
                self._drop(peer)

    def _submit(self, peer: Peer, gateway: GatewayJobs, message: Submit) -> None:
        if message.epoch != self.epoch:  # meant for the process that was here before
            gateway.refuse(message.attempt, PacelineError("that was for another epoch"))
            return
        if len(gateway.jobs) >= MAX_JOBS:
            gateway.refuse(message.attempt, PacelineError(f"{MAX_JOBS} requests of this gateway are running here"))
            return
        job = Job(peer, message.attempt, f"{next(self._numbers)}")
        try:
            check_limits(message.request)
            request = replace(message.request, id=job.request_id)
            job.begin(request)
            gateway.jobs[job.attempt] = job
            if self._handoffs is None:
                self._loop.submit(request, self._listen(job))
            else:
                self._handoffs.submit(request, self._listen(job), message.peer)
        except PacelineError as error:
            gateway.jobs.pop(job.attempt, None)
            gateway.refuse(message.attempt, error)
        except Exception as error:  # whatever a request holds, it must not end the worker for the others
            logger.exception("a request could not be taken")
            gateway.jobs.pop(job.attempt, None)
            gateway.refuse(message.attempt, InvalidRequest(f"the request cannot be served: {error!r}"))

    def _prefill(self, peer: Peer, gateway: GatewayJobs, message: Prefill) -> None:
        try:
            if self._desk is None:
                raise InvalidRequest("this worker gives no part of its cache away")
            if message.epoch != self.epoch:
                raise PacelineError("that was for another epoch")
            granted = self._desk.ask(peer, message)
            self._listener.send(peer, granted)  # if it is lost, whoever asked withdraws it in time
        except PacelineError as error:
            gateway.refuse(message.attempt, error)
        except Exception as error:  # whatever it holds, it must not end the worker for the others
            logger.exception("a prompt could not be taken")
            gateway.refuse(message.attempt, PacelineError(f"it cannot be computed here: {error!r}"))

    def _listen(self, job: Job) -> Callable[[OutputEvent], None]:
        def listen(event: OutputEvent) -> None:  # on the engine's thread
            self._news.append((job, event))
            self._listener.wake()

        return listen

    def _tell(self) -> None:
        """Send what the engine said, one message a gateway."""
        news: defaultdict[Peer, list[tuple[Job, OutputEvent]]] = defaultdict(list)
        while self._news:
            job, event = self._news.popleft()
            news[job.peer].append((job, event))
        for peer, gateway in self._gateways.items():
            gateway.tell(news[peer])
            gateway.flush(partial(self._listener.send, peer))

    def _withdraw(self, gateway: GatewayJobs, attempt: int) -> None:
        job = gateway.jobs.pop(attempt, None)
        if job is not None and self._loop.is_running:
            self._requests.cancel(job.request_id)

    def _drop_silent(self) -> None:
        now = self._clock.now()
        for peer in [peer for peer, gateway in self._gateways.items() if now - gateway.heard > SILENCE]:
            logger.warning("a gateway went silent; its %d streams are dropped", len(self._gateways[peer].jobs))
            self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        gateway = self._gateways.pop(peer)
        if self._desk is not None:
            self._desk.drop(peer)
        for attempt in list(gateway.jobs):
            self._withdraw(gateway, attempt)

    def _change(self, message: SetFlags) -> None:
        try:
            self._engine.validate_flags(message.flags)
            self._flags = message.flags
            self._set_flags()
        except PacelineError as error:  # the gateway checked them: it runs another version, or was told wrong
            logger.warning("flags were not taken over: %s", error)

    def _set_flags(self) -> None:
        flags = self._pressure.limit(self._flags)
        self._loop.call(lambda: self._engine.set_flags(flags))

    def _report(self) -> StatusReport:
        snapshot = self._engine.snapshot()
        if self._pressure.observe(snapshot, self._engine.num_steps) and self._loop.is_running:
            self._set_flags()
        handed = self._handoffs or self._desk
        drafts = self._drafts
        status = replace(
            snapshot,
            drafters=() if drafts is None else tuple(drafts.drafters()),
            symptoms=(
                *(() if drafts is None else drafts.symptoms()),
                *self._pressure.active,
                *snapshot.audit.symptoms,
            ),
            handoffs=None if handed is None else handed.record(),
        )
        return StatusReport(self.epoch, self.name, status)

    def _pulse(self, nonce: int) -> Heartbeat:
        snapshot = self._engine.snapshot()
        loading = None if self._weights is None else self._weights.progress
        return Heartbeat(
            nonce=nonce,
            epoch=self.epoch,
            steps=self._engine.num_steps,
            is_busy=self._engine.has_work and loading is None,  # waiting for a layer is no stall
            running=snapshot.running,
            waiting=snapshot.waiting,
            kv_used=snapshot.kv_used,
            kv_total=snapshot.kv_total,
            prompt_tokens=self._engine.scheduler.num_prompt_tokens,
            loading=loading,
        )

    def _welcome(self) -> Welcome:
        validator = self._engine.validator
        assert self._engine.tokenizer is not None
        flags = self._engine.snapshot().flags
        return Welcome(
            version=VERSION,
            epoch=self.epoch,
            name=self.name,
            vocabulary=fingerprint(self._engine.tokenizer).vocabulary,
            vocab_size=validator.limits.vocab_size,
            max_model_len=validator.limits.max_model_len,
            max_num_seqs=self._engine.scheduler.max_num_seqs,
            max_depth=validator.offered_depth,
            methods=sorted(self._engine.speculator.proposers),
            default_method=flags.method or "",
            events_port=self._publisher.port if self._publisher else 0,
            replay_port=self._publisher.replay_port if self._publisher else 0,
        )
