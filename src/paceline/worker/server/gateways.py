"""The gateways of a worker: their submissions, and the messages to them."""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from paceline.core.clock import Clock
from paceline.core.errors import GenerationFailed, InvalidRequest, PacelineError, WeightsChanged
from paceline.core.output import OutputEvent, StepOutput
from paceline.core.request import Request
from paceline.wire.draft_messages import MAX_OUTPUTS
from paceline.wire.gateway_messages import FailureKind, FromGateway, Output, Outputs, RequestFailed
from paceline.wire.transport import Listener, Peer
from paceline.worker.server.resumable import ResumableStream

logger = logging.getLogger(__name__)

MAX_REASON = 2000
"""Characters of an error message."""
GATEWAY_TIMEOUT = 10.0
"""Seconds without a message after which a gateway's requests are cancelled."""
PAUSE_SECONDS = 1.0
"""Time between two checks for silent gateways from which the worker itself was suspended."""


class Submission:
    """A request of a gateway. Any thread may call `put`; the thread of the server uses the rest."""

    __slots__ = ("_session", "attempt", "kept", "num_tokens", "num_unfinished", "num_unreported", "request")

    def __init__(self, session: "GatewaySession", attempt: int, request: Request) -> None:
        self._session, self.attempt, self.request = session, attempt, request
        committed = request.committed or ((),) * request.sampling.n
        self.num_tokens = [len(tokens or ()) for tokens in committed]
        """Output tokens by choice in the messages so far, including those that another worker committed."""
        self.num_unfinished = len(request.unfinished)
        """Choices that are still generated."""
        self.num_unreported = self.num_unfinished
        """Choices whose last output is in no message yet."""
        self.kept: ResumableStream | None = None
        """Tokens of a resumable stream."""

    @property
    def request_id(self) -> str:
        return self.request.id

    @property
    def is_running(self) -> bool:
        """Whether it was not cancelled, and generates."""
        return self.num_unfinished > 0 and self._session.jobs.get(self.attempt) is self

    def start(self, call: Callable[[], None]) -> None:
        """Start the request by `call`. An error of it ends the request."""
        try:
            call()
        except PacelineError as error:
            self.put(error)
        except Exception as error:  # No request may end the worker for the remaining requests
            logger.exception("a request could not be started")
            text = f"the request cannot be served ({type(error).__name__}): change its parameters"
            self.put(InvalidRequest(text))

    def put(self, event: OutputEvent) -> None:
        """Queue an output, or the error that ends the request."""
        if not isinstance(event, StepOutput):
            self.num_unfinished = 0
        else:
            if self.kept is not None:
                self.kept.add(event.choice, event.tokens)
            if event.finish_reason is not None:
                self.num_unfinished -= 1
        self._session.events.append((self, event))
        self._session.wake()


class GatewaySession:
    """The submissions of a gateway, and the events that it is still to be told."""

    __slots__ = ("_unsent", "events", "jobs", "last_message", "wake")

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` makes the thread of the server call `flush`."""
        self.wake = wake
        self.last_message = 0.0
        """Time of the gateway's last message."""
        self.jobs: dict[int, Submission] = {}
        """Submissions by attempt. A submission stays until it is cancelled or the message with its last event is made."""
        self.events: deque[tuple[Submission, OutputEvent] | RequestFailed] = deque()
        """Events in order, which any thread appends. The tokens of the admitted requests bound its size."""
        self._unsent: Outputs | RequestFailed | None = None
        """Message of the first events, which the send queue has not accepted yet."""

    def submit(self, attempt: int, request: Request) -> Submission:
        job = self.jobs[attempt] = Submission(self, attempt, request)
        return job

    def fail(self, attempt: int, error: PacelineError) -> None:
        """Queue a `RequestFailed`. If the attempt is in `jobs`, the caller takes it out."""
        self.events.append(_failure(attempt, error))

    @property
    def attempts(self) -> list[int]:
        """Submissions that run, and those whose last message is not sent yet."""
        attempts = set(self.jobs)
        attempts.update(event.attempt for event in list(self.events) if isinstance(event, RequestFailed))
        if isinstance(self._unsent, RequestFailed):
            attempts.add(self._unsent.attempt)
        elif self._unsent is not None:
            attempts.update(output.attempt for output in self._unsent.outputs)
        return sorted(attempts)

    def flush(self, send: Callable[[Outputs | RequestFailed], bool]) -> None:
        """Make messages of the events and send them in order, until `send` returns False."""
        while self._unsent is not None or self.events:
            if self._unsent is None:
                self._unsent = self._next_message()
            if self._unsent is not None:
                if not send(self._unsent):
                    return
                self._unsent = None

    def _next_message(self) -> Outputs | RequestFailed | None:
        """One message of all outputs that come first, or the failure that comes first. None if the events were of
        submissions that have ended."""
        outputs: list[Output] = []
        while self.events and len(outputs) < MAX_OUTPUTS:
            first = self.events[0]
            if isinstance(first, RequestFailed):
                if not outputs:
                    self.events.popleft()
                    return first
                break
            job, event = first
            if self.jobs.get(job.attempt) is not job:
                self.events.popleft()
            elif isinstance(event, StepOutput):
                self.events.popleft()
                outputs.append(self._output(job, event))
            elif outputs:
                break
            else:
                self.events.popleft()
                del self.jobs[job.attempt]
                return _failure(job.attempt, event)
        return Outputs(outputs) if outputs else None

    def _output(self, job: Submission, event: StepOutput) -> Output:
        choice, count = event.choice, len(event.tokens)
        start = job.num_tokens[choice]
        job.num_tokens[choice] = start + count
        if event.finish_reason is not None:
            job.num_unreported -= 1
            if job.num_unreported == 0:
                del self.jobs[job.attempt]
        return Output(
            job.attempt,
            choice,
            start,
            event.tokens,
            event.origins,
            event.drafted,
            event.accepted,
            event.num_cached,
            event.waited,
            event.finish_reason,
            event.logprobs,
            event.prompt_logprobs,
        )


def _failure(attempt: int, error: PacelineError) -> RequestFailed:
    field = error.field if isinstance(error, InvalidRequest) else None
    text = str(error)[:MAX_REASON].encode(errors="replace").decode()  # it may quote lone surrogates
    kind = FailureKind.LOST
    if isinstance(error, WeightsChanged):
        kind = FailureKind.CHANGED
    elif isinstance(error, InvalidRequest | GenerationFailed):
        kind = FailureKind.INVALID if isinstance(error, InvalidRequest) else FailureKind.FAILED
    return RequestFailed(attempt, kind, text, field)


class GatewaySessions:
    """The thread that owns the listener uses it."""

    def __init__(self, listener: Listener[FromGateway], clock: Clock) -> None:
        self.by_peer: dict[Peer, GatewaySession] = {}
        self._listener, self._clock = listener, clock
        self._is_awake = False
        self._last_check: float | None = None
        """Time of the last check for silent gateways."""

    def heard(self, peer: Peer) -> GatewaySession:
        """The session of a gateway that has just sent a message."""
        session = self.by_peer.get(peer)
        if session is None:
            session = self.by_peer[peer] = GatewaySession(self._wake)
        session.last_message = self._clock.now()
        return session

    @property
    def num_running(self) -> int:
        """Submissions that generate."""
        return sum(job.is_running for session in self.by_peer.values() for job in session.jobs.values())

    @property
    def has_work(self) -> bool:
        """Whether a submission runs, or its last message is not sent yet."""
        return any(session.attempts for session in self.by_peer.values())

    def send_events(self) -> None:
        """Send the events of all gateways, those of a step in one message to each gateway, as far as the send queues accept
        it."""
        self._is_awake = False  # before reading: an event that arrives from here on wakes the thread again
        for peer, session in self.by_peer.items():
            session.flush(partial(self._listener.send, peer))

    def fail_silent(self) -> list[Peer]:
        """Gateways without a message for `GATEWAY_TIMEOUT`. Their requests fail, and a gateway that was suspended continues its
        streams when it returns. The caller drops them. Time in which the worker itself was suspended does not count: messages
        of that time wait in its queue."""
        now = self._clock.now()
        paused = 0.0 if self._last_check is None else now - self._last_check
        self._last_check = now
        if paused > PAUSE_SECONDS:
            for session in self.by_peer.values():
                session.last_message = min(now, session.last_message + paused)
        silent = [peer for peer, session in self.by_peer.items() if now - session.last_message > GATEWAY_TIMEOUT]
        for peer in silent:
            session = self.by_peer[peer]
            running = [attempt for attempt, job in session.jobs.items() if job.is_running]
            logger.warning("a gateway is silent; its %d requests are cancelled", len(running))
            for attempt in running:
                session.fail(attempt, PacelineError(f"the gateway was silent for {GATEWAY_TIMEOUT:.0f} s"))
            session.flush(partial(self._listener.send, peer))
        return silent

    def _wake(self) -> None:
        if not self._is_awake:  # once for all outputs of a step
            self._is_awake = True
            self._listener.wake()
