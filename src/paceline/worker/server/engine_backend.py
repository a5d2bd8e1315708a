"""Requests that gateways have submitted to a target worker: passes them to the engine, cancels them, and gives the tokens of
resumable streams.

Compiles the grammars of received requests, so that neither the worker's thread nor the engine's waits for it.

The gateway's flags of speculation on a target worker, limited while its cache is under pressure.

Failure modes of drafting inside an engine: low acceptance, and drafts that take longer than verification.

A draft pool reports the same symptoms, and that of a slow network, itself.
"""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from operator import mul
from queue import SimpleQueue

from paceline.core.errors import GenerationFailed, InvalidRequest, PacelineError
from paceline.core.request import Request, SpeculationFlags
from paceline.core.status import EngineStatus, Symptom, TrafficStatus
from paceline.engine import EngineLoop
from paceline.policy.cost.symptoms import Measurements, SymptomWatch
from paceline.requests import RequestValidator
from paceline.wire.gateway_messages import Submit, TokensReply, TokensRequest, check_limits
from paceline.wire.transport import Peer
from paceline.worker.handoff import Handoffs
from paceline.worker.server.gateways import GatewaySession, GatewaySessions, ResumableStreams, Submission

logger = logging.getLogger(__name__)

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


EXPIRY_SECONDS = 1.0
"""Interval at which the tokens of resumable streams are checked for their age."""


class Submissions:
    """The thread that owns the worker's listener uses it."""

    def __init__(
        self, loop: EngineLoop, handoffs: Handoffs | None, gateways: GatewaySessions, wake: Callable[[], None]
    ) -> None:
        """`handoffs` is a client of prefill workers, which passes the requests to the engine. `wake` ends the wait of the
        thread that calls `poll`."""
        self._loop, self._handoffs, self._gateways = loop, handoffs, gateways
        self._requests: Handoffs | EngineLoop = handoffs or loop
        self._numbers = itertools.count()
        self._kept = ResumableStreams()
        self._next_expiry = 0.0
        self._grammars = GrammarThread(loop.engine.validator, wake)

    def submit(self, peer: Peer, gateway: GatewaySession, message: Submit) -> None:
        """Start a request that the worker accepts. A grammar is compiled first, on another thread."""
        request = replace(message.request, id=f"{next(self._numbers)}")
        job = gateway.jobs[message.attempt] = Submission(peer, message.attempt, request)
        if request.resume_key:
            job.kept = self._kept.keep(request, lambda: gateway.jobs.get(job.attempt) is job)
        if request.sampling.json_schema is None:
            self._start(gateway, job, request, message)
            return

        def start(error: PacelineError | None) -> None:
            if gateway.jobs.get(job.attempt) is not job:  # cancelled meanwhile
                return
            if error is None:
                self._start(gateway, job, request, message)
            else:
                del gateway.jobs[job.attempt]
                gateway.fail(job.attempt, error)

        self._grammars.compile(request, start)

    def _start(self, gateway: GatewaySession, job: Submission, request: Request, message: Submit) -> None:
        """Validate the request, whose gateway may have another version, and pass it to the engine."""
        try:
            check_limits(request)
            validated = self._loop.engine.validate(request)
            if self._handoffs is None:
                self._loop.submit(validated, self._gateways.listener_of(job))
            else:
                self._handoffs.submit(validated, self._gateways.listener_of(job), message.peer)
        except PacelineError as error:
            gateway.jobs.pop(job.attempt, None)
            gateway.fail(message.attempt, error)
        except Exception as error:  # No request may end the worker for the remaining requests
            logger.exception("a request could not be started")
            gateway.jobs.pop(job.attempt, None)
            text = f"the request cannot be served ({type(error).__name__}): change its parameters"
            gateway.fail(message.attempt, InvalidRequest(text))

    def cancel(self, gateway: GatewaySession, attempt: int) -> None:
        """Stop a request. An unknown or finished one is not an error."""
        job = gateway.jobs.pop(attempt, None)
        if job is not None and self._loop.is_running:
            self._requests.cancel(job.request_id)

    def cancel_all(self, gateway: GatewaySession) -> None:
        for attempt in list(gateway.jobs):
            self.cancel(gateway, attempt)

    def reply_with_tokens(self, message: TokensRequest) -> TokensReply:
        """The tokens of a resumable stream. If it still runs, for a gateway that its client has left, it ends."""
        stream = self._kept.find(message.key)
        if stream is None:
            return TokensReply(message.number, None, [])
        for gateway in self._gateways.values():
            for attempt in [attempt for attempt, job in gateway.jobs.items() if job.kept is stream]:
                self.cancel(gateway, attempt)
                gateway.fail(attempt, GenerationFailed("its client has resumed it through another gateway"))
        return TokensReply(message.number, stream.seed, [list(tokens) for tokens in stream.choices])

    def poll(self, now: float) -> None:
        """Start the requests whose grammars are compiled, and drop the tokens of streams that ended long ago."""
        self._grammars.run_finished()
        if now >= self._next_expiry:
            self._next_expiry = now + EXPIRY_SECONDS
            self._kept.expire(now)

    def close(self) -> None:
        """Requests that wait for a grammar are dropped."""
        self._grammars.close()


FLAG_PERSISTENCE = 3
"""Observations in a row, `PRESSURE_SECONDS` apart, that start or end the limit."""
LIMITED_DEPTH = 1
"""Greatest depth while sequences are preempted for lack of cache blocks, some of which hold drafts."""
PRESSURE_SECONDS = 1.0
"""Interval of the observations of `KvPressure`."""


class KvPressure:
    """Watches preemptions per step. While they persist, `limit` bounds the depth of the operator's flags."""

    def __init__(self) -> None:
        self._watch = SymptomWatch(FLAG_PERSISTENCE)
        self._last: tuple[int, int] | None = None

    @property
    def active(self) -> tuple[Symptom, ...]:
        return self._watch.active

    def observe(self, status: EngineStatus, steps: int) -> bool:
        """Returns whether the limit starts or ends."""
        last, now = self._last, (status.preemptions, steps)
        self._last = now
        if last is None:
            return False
        preemptions, new_steps = now[0] - last[0], now[1] - last[1]
        if not new_steps and (status.running or status.waiting):  # one long step
            return False
        rate = preemptions / new_steps if new_steps else 0.0
        was_active = bool(self.active)
        for symptom in self._watch.observe(Measurements(preemptions=rate if status.flags.enabled else 0.0)):
            logger.warning("%s", symptom)
        return bool(self.active) != was_active

    def limit(self, flags: SpeculationFlags) -> SpeculationFlags:
        if not self.active:
            return flags
        depth = LIMITED_DEPTH if flags.max_depth is None else min(LIMITED_DEPTH, flags.max_depth)
        return replace(flags, max_depth=depth)


class WorkerFlags:
    """Applies flags to the engine. The thread of the worker calls it."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop, self._engine = loop, loop.engine
        self._flags, self._pressure = SpeculationFlags(), KvPressure()
        self._next_observation = 0.0

    @property
    def symptoms(self) -> tuple[Symptom, ...]:
        return tuple(self._pressure.active)

    def set(self, flags: SpeculationFlags) -> None:
        """Flags that the engine refuses are ignored with a warning."""
        try:
            self._engine.flags.validate(flags)
            self._flags = flags
            self._apply()
        except PacelineError as error:  # the gateway's configuration differs from this worker's
            logger.warning("the flags are ignored: %s", error)

    def observe(self, status: EngineStatus, now: float) -> bool:
        """Limit the flags by the pressure on the cache, once per `PRESSURE_SECONDS`. Returns whether it was time for that."""
        if now < self._next_observation:
            return False
        self._next_observation = now + PRESSURE_SECONDS
        if self._pressure.observe(status, self._engine.num_steps) and self._loop.is_running:
            self._apply()
        return True

    def _apply(self) -> None:
        flags = self._pressure.limit(self._flags)
        self._loop.call(lambda: self._engine.flags.apply(flags))


SYMPTOM_PERSISTENCE = 3
"""Observations in a row, about a second apart, that start or end a symptom."""


class DraftSymptoms:
    """Watches acceptance and times of an engine's own proposers."""

    def __init__(self) -> None:
        self._watch = SymptomWatch(SYMPTOM_PERSISTENCE)
        self._last: EngineStatus | None = None

    @property
    def active(self) -> tuple[Symptom, ...]:
        return self._watch.active

    def observe(self, status: EngineStatus) -> None:
        """Compare with the status of the last call; the log has a line for each new symptom."""
        last, self._last = self._last, status
        if last is None or not _num_tested(last) < _num_tested(status):  # no drafts: what is known stays
            return
        for symptom in self._watch.observe(_measure(last, status)):
            logger.warning("%s", symptom)


def _measure(last: EngineStatus, now: EngineStatus) -> Measurements:
    """Measurements of the rounds between two reports."""
    before = {(traffic.method, traffic.category): traffic.tested for traffic in last.traffic}
    grown = [(traffic, traffic.tested - before.get((traffic.method, traffic.category), 0)) for traffic in now.traffic]
    weights = [(traffic, count) for traffic, count in grown if count > 0]
    total = sum(count for _, count in weights)
    draft, verify = (now.seconds.get(part, 0.0) - last.seconds.get(part, 0.0) for part in ("draft", "verify"))
    return Measurements(
        accepted=sum(count * _accepted(traffic) for traffic, count in weights) / total,
        depth=sum(count * traffic.mean_depth for traffic, count in weights) / total,
        draft_seconds=draft if verify > 0 else None,
        verify_seconds=verify if verify > 0 else None,
    )


def _accepted(traffic: TrafficStatus) -> float:
    """Expected accepted drafts of a round, from the acceptance of each position."""
    return sum(accumulate(traffic.alphas, mul))


def _num_tested(status: EngineStatus) -> int:
    return sum(traffic.tested for traffic in status.traffic)
