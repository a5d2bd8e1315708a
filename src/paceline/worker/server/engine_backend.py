"""The engine of a target worker behind its server: it starts and cancels requests, reports the engine's state, and finds an
engine that hangs."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Protocol

from paceline.core.errors import GenerationFailed, InvalidRequest, PacelineError
from paceline.core.request import Request
from paceline.core.status import EngineStatus
from paceline.drafting import PoolControl
from paceline.engine import EngineLoop
from paceline.model_files.tokenizer import fingerprint
from paceline.policy.health import StallDetector, StepProgress
from paceline.requests import RequestValidator
from paceline.transfer.weights import WeightManager
from paceline.wire.draft_messages import VERSION
from paceline.wire.gateway_messages import (
    Cancel,
    ChangeWeights,
    FromTargetWorker,
    Prefill,
    PrefillStarted,
    SetFlags,
    Submit,
    SwapDraft,
    TokensReply,
    TokensRequest,
    Welcome,
    WorkerList,
    check_limits,
)
from paceline.wire.kv_events import KvPublisher
from paceline.wire.lifecycle import Lifecycle
from paceline.wire.transport import Peer
from paceline.worker.handoff import Handoffs, PrefillService
from paceline.worker.server.backend import WRONG_EPOCH, BackendReport, Control, WorkerFailed
from paceline.worker.server.draft_swap import DraftSwaps
from paceline.worker.server.gateways import Submission
from paceline.worker.server.resumable import ResumableStreams
from paceline.worker.server.symptoms import DraftSymptoms, HostSteps, WorkerFlags
from paceline.worker.server.weights_change import WeightsChanges

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""Time between two calls of `EngineBackend.poll` from which the process itself was suspended."""
HANG_SECONDS = 10.0
"""Time that a step may take beyond its predicted time before the worker exits. Gateways continue its streams much earlier."""
UNMEASURED_HANG_SECONDS = 600.0
"""The same for the first steps of a size, which may compile kernels."""
EXPIRY_SECONDS = 1.0
"""Interval at which the tokens of resumable streams are checked for their age."""

Continue = Callable[[PacelineError | None], None]
"""Receives the error of the schema. None if the grammar is compiled."""


class GrammarThread:
    """One thread. llguidance releases the interpreter's lock while it compiles; the validator keeps the grammar."""

    def __init__(self, validator: RequestValidator, wake: Callable[[], None]) -> None:
        """`wake` ends the wait of the thread that calls `run_finished`."""
        self._validator, self._wake = validator, wake
        self._queue: SimpleQueue[tuple[Request, Continue] | None] = SimpleQueue()
        self._finished: deque[tuple[Continue, PacelineError | None]] = deque()
        self._thread = threading.Thread(target=self._run, name="paceline-grammars", daemon=True)
        self._thread.start()

    def compile(self, request: Request, then: Continue) -> None:
        """Compile the grammar of the request, then let `run_finished` call `then`."""
        self._queue.put((request, then))

    def run_finished(self) -> None:
        """Continue the requests whose grammars are compiled, on the caller's thread."""
        while self._finished:
            then, error = self._finished.popleft()
            then(error)

    def close(self) -> None:
        """End the thread; requests that wait are dropped."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            request, then = item
            error: PacelineError | None = None
            try:
                self._validator.grammar(request)
            except PacelineError as failure:
                error = failure
            except BaseException as failure:  # a panic of llguidance is no `Exception`
                logger.error("a grammar could not be compiled", exc_info=failure)
                error = InvalidRequest(
                    f"the JSON schema cannot be used: {type(failure).__name__}", field="response_format"
                )
            self._finished.append((then, error))
            self._wake()


class WorkerHung(WorkerFailed):
    """A step does not end. The engine's thread cannot be stopped: the process must exit at once."""


class Closeable(Protocol):
    def close(self) -> None: ...


class EngineBackend:
    """An engine on its own thread, and all that it works with. A prefill worker has one too, with a service that computes."""

    idle_seconds = 0.25

    def __init__(
        self,
        name: str,
        loop: EngineLoop,
        *,
        drafts: PoolControl | None = None,
        publisher: KvPublisher | None = None,
        weights: WeightManager | None = None,
        handoffs: Handoffs | None = None,
        prefill_service: PrefillService | None = None,
        draft_swaps: DraftSwaps | None = None,
        weights_changes: WeightsChanges | None = None,
        tracing: Closeable | None = None,
    ) -> None:
        """`name` is that of the worker. `handoffs` is a client of prefill workers, which passes the requests to the engine.
        `prefill_service` computes or sends prompts for other targets. `draft_swaps` swaps the draft inside the engine,
        and `weights_changes` replaces the target's weights. All parts are closed at the end."""
        self._name, self._loop, self._engine = name, loop, loop.engine
        self._drafts, self._publisher, self._tracing = drafts, publisher, tracing
        self._weights = weights
        self._handoffs, self._prefill_service, self._draft_swaps = handoffs, prefill_service, draft_swaps
        self._weights_changes, self._fingerprint = weights_changes, loop.engine.fingerprint
        if publisher is not None:
            self._engine.listen(publisher.put)
        self._flags, self._draft_symptoms, self._host_steps = WorkerFlags(loop), DraftSymptoms(), HostSteps()
        self._resumable, self._next_expiry = ResumableStreams(), 0.0
        self._grammars = GrammarThread(loop.engine.validator, lambda: self._lifecycle.wake())
        self._steps = StallDetector(HANG_SECONDS, UNMEASURED_HANG_SECONDS)
        self._last_poll: float | None = None
        self._is_hung = False

    @property
    def weight_address(self) -> str:
        return "" if self._weights is None else self._weights.address

    @property
    def is_loading(self) -> bool:
        return self._weights is not None and self._weights.progress is not None

    @property
    def is_serving(self) -> bool:
        return True

    @property
    def has_other_work(self) -> bool:
        """Also if the engine has stopped: `poll` then raises, and the drain does not end without an error."""
        service = self._prefill_service
        return not self._loop.is_running or (service is not None and service.num_jobs > 0)

    def attach(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        if self._weights_changes is not None:
            self._weights_changes.attach(lifecycle.wake)

    def announce(self, tell: Callable[[Welcome], None]) -> None:
        if self._weights_changes is not None:
            self._weights_changes.announce(lambda: self._announce(tell))

    def _announce(self, tell: Callable[[Welcome], None]) -> None:
        """The engine has other weights, and has generated nothing with them yet."""
        self._fingerprint = self._engine.fingerprint
        self._resumable.clear()
        tell(self.welcome())

    def welcome(self) -> Welcome:
        engine, publisher = self._engine, self._publisher
        assert engine.tokenizer is not None
        limits = engine.validator.limits
        return Welcome(
            version=VERSION,
            epoch=self._lifecycle.epoch,
            name=self._name,
            vocabulary=fingerprint(engine.tokenizer).vocabulary,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=engine.scheduler.max_num_seqs,
            max_depth=limits.max_depth,
            methods=sorted(engine.speculator.proposers),
            default_method=engine.status.snapshot().flags.method or "",
            events_port=publisher.port if publisher else 0,
            replay_port=publisher.replay_port if publisher else 0,
            fingerprint=self._fingerprint,
            change=0 if self._weights_changes is None else self._weights_changes.number,
            memory=None if self._prefill_service is None else self._prefill_service.cache_memory,
        )

    def report(self) -> BackendReport:
        if self._drafts is not None:
            self._drafts.maintain()
        snapshot, progress = self._engine.status.snapshot(), self._progress()
        return BackendReport(
            steps=progress.steps,
            is_busy=progress.is_busy,
            running=snapshot.running,
            waiting=snapshot.waiting,
            kv_used=snapshot.kv_used,
            kv_total=snapshot.kv_total,
            prompt_tokens=self._engine.scheduler.num_prompt_tokens,
            loading=None if self._weights is None else self._weights.progress,
            step_seconds=progress.step_seconds,
        )

    def status(self) -> EngineStatus:
        """The engine's status, with what its parts report and the symptoms that the worker itself has found."""
        snapshot, drafts = self._engine.status.snapshot(), self._drafts
        if self._flags.observe(snapshot, self._lifecycle.clock.now()):
            self._host_steps.observe(snapshot)
            if drafts is None:
                self._draft_symptoms.observe(snapshot)
        of_drafts = self._draft_symptoms.active if drafts is None else drafts.symptoms()
        handoffs = self._handoffs or self._prefill_service
        return replace(
            snapshot,
            drafters=() if drafts is None else tuple(drafts.drafters()),
            symptoms=(*of_drafts, *self._flags.symptoms, *self._host_steps.active, *snapshot.audit.symptoms),
            handoffs=None if handoffs is None else handoffs.counts(),
            draft=None if self._draft_swaps is None else self._draft_swaps.status,
            weights=None if self._weights_changes is None else self._weights_changes.status,
        )

    def submit(self, job: Submission, message: Submit) -> None:
        """Start a request. A grammar is compiled first, on another thread."""
        request = job.request
        if request.resume_key:
            job.kept = self._resumable.keep(request, lambda: job.is_running, lambda: self._end_resumed(job))
        if request.sampling.constraint is None:
            self._start(job, message)
            return

        def start(error: PacelineError | None) -> None:
            if not job.is_running:  # cancelled meanwhile
                return
            if error is None:
                job.start(lambda: self._start(job, message))
            else:
                job.put(error)

        self._grammars.compile(request, start)

    def cancel(self, job: Submission) -> None:
        if self._loop.is_running:
            (self._handoffs or self._loop).cancel(job.request_id)

    def handle(self, peer: Peer, message: Control) -> FromTargetWorker | None:
        match message:
            case Prefill():
                return self._prefill(peer, message)
            case TokensRequest():
                return self._tokens(message)
            case SetFlags():
                self._flags.set(message.flags)
            case SwapDraft():
                if self._draft_swaps is not None:
                    self._draft_swaps.start(message)
            case ChangeWeights():
                if self._weights_changes is not None:
                    self._weights_changes.start(message)
            case WorkerList():
                if self._drafts is not None:
                    self._drafts.set_workers(message.drafts)
                if self._handoffs is not None:
                    others = [worker for worker in message.peers if worker.name != self._name]
                    self._handoffs.set_workers(message.prefillers, others)
            case Cancel():
                if self._prefill_service is not None:
                    for attempt in message.attempts:
                        self._prefill_service.cancel(peer, attempt)
        return None

    def drop(self, peer: Peer) -> None:
        if self._prefill_service is not None:
            self._prefill_service.cancel_all(peer)

    def poll(self, now: float) -> None:
        self._grammars.run_finished()
        if now >= self._next_expiry:
            self._next_expiry = now + EXPIRY_SECONDS
            self._resumable.expire(now)
        self._is_hung = self._has_hung(now)
        if self._is_hung:
            raise WorkerHung(f"a step of {self._name} does not end: the worker exits and is restarted")
        if self._weights is not None and self._weights.error is not None:
            raise WorkerFailed(f"{self._name} failed to load its model: {self._weights.error}")
        if not self._loop.is_running:
            raise WorkerFailed(f"the engine of {self._name} has stopped; see the log above")

    def close(self) -> None:
        """Close all parts. Requests that wait for a grammar are dropped."""
        self._grammars.close()
        if self._weights is not None:
            self._weights.close()  # first: a forward pass may wait for a layer
        if self._is_hung:  # All remaining requests wait for the engine's thread
            return
        if self._handoffs is not None:
            self._handoffs.close()
        self._loop.close()
        for part in (self._prefill_service, self._drafts, self._tracing, self._publisher):
            if part is not None:
                part.close()

    def _start(self, job: Submission, message: Submit) -> None:
        """Validate the request, whose gateway may have another version, and pass it to the engine."""
        check_limits(job.request)
        request = self._engine.validate(job.request)
        if self._handoffs is None:
            self._loop.submit(request, job.put)
        else:
            self._handoffs.submit(request, job.put, message.peer)

    def _end_resumed(self, job: Submission) -> None:
        self.cancel(job)
        job.put(GenerationFailed("its client has resumed it through another gateway"))

    def _tokens(self, message: TokensRequest) -> TokensReply:
        """The tokens of a resumable stream. If it still runs, for a gateway that its client has left, it ends."""
        stream = self._resumable.find(message.key)
        if stream is None:
            return TokensReply(message.number, None, [])
        if stream.is_running():
            stream.end()
        return TokensReply(message.number, stream.seed, [list(tokens) for tokens in stream.choices])

    def _prefill(self, peer: Peer, message: Prefill) -> PrefillStarted:
        if self._prefill_service is None:
            raise InvalidRequest("this worker does not send cached blocks")
        if message.epoch != self._lifecycle.epoch:
            raise PacelineError(WRONG_EPOCH)
        if self._lifecycle.is_draining and self._prefill_service.computes:
            raise PacelineError(f"{self._name} is draining")
        return self._prefill_service.start(peer, message)

    def _progress(self) -> StepProgress:
        """Progress of the engine's steps. A wait for a layer that is still loading is not a stall."""
        engine, epoch = self._engine, self._lifecycle.epoch
        return StepProgress(epoch, engine.num_steps, engine.has_work and not self.is_loading, engine.watch.step_seconds)

    def _has_hung(self, now: float) -> bool:
        """Whether the current step has taken far longer than predicted."""
        if self._last_poll is not None and now - self._last_poll > PAUSE_SECONDS:
            self._steps.forgive(now - self._last_poll)
        self._last_poll = now
        self._steps.observe(self._progress(), now)
        return self._steps.is_stalled(now)
