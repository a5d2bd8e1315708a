"""The gateways of a worker: their requests, the messages to them, and the drain that ends their service.

Requests of one gateway on a target worker, and the messages to be sent to it.

Output tokens of resumable streams, kept for a while after they ended or lost their gateway.
"""

import logging
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from paceline.core.clock import Clock
from paceline.core.errors import GenerationFailed, InvalidRequest, PacelineError
from paceline.core.output import OutputEvent, StepOutput
from paceline.core.request import Request
from paceline.wire.draft_messages import MAX_OUTPUTS, VERSION, Goodbye, Hello
from paceline.wire.gateway_messages import FailureKind, FromGateway, Output, Outputs, RequestFailed, Submit, Welcome
from paceline.wire.transport import Listener, Peer

KEEP_SECONDS = 60.0
MAX_TOKENS = 4_000_000
"""Tokens kept in all, four bytes each. Beyond them the oldest ended streams are dropped."""


class ResumableStream:
    """The seed of a stream and its output tokens by choice, including those that other workers committed."""

    __slots__ = ("choices", "ended", "is_running", "seed")

    def __init__(self, request: Request, is_running: Callable[[], bool]) -> None:
        assert request.sampling.seed is not None
        self.seed = request.sampling.seed
        committed = request.committed or ((),) * request.sampling.n
        self.choices = [array("I", tokens or ()) for tokens in committed]
        self.is_running = is_running
        self.ended: float | None = None
        """Time since which it does not run."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.choices))

    def add(self, choice: int, tokens: Sequence[int]) -> None:
        self.choices[choice].extend(tokens)


class ResumableStreams:
    """Streams by resume key. The caller passes the time, in seconds."""

    def __init__(self, seconds: float = KEEP_SECONDS, max_tokens: int = MAX_TOKENS) -> None:
        self._seconds, self._max_tokens = seconds, max_tokens
        self._streams: dict[str, ResumableStream] = {}

    def keep(self, request: Request, is_running: Callable[[], bool]) -> ResumableStream:
        """Keep the tokens of a request that starts now. One with the same key is replaced."""
        self._streams.pop(request.resume_key, None)
        stream = self._streams[request.resume_key] = ResumableStream(request, is_running)
        return stream

    def find(self, key: str) -> ResumableStream | None:
        return self._streams.get(key)

    def expire(self, now: float) -> None:
        """Drop the streams that ended long ago, and the oldest ended ones if there are too many tokens."""
        total = 0
        for key, stream in list(self._streams.items()):
            if stream.is_running():
                stream.ended = None
            elif stream.ended is None:
                stream.ended = now
            elif now - stream.ended > self._seconds:
                del self._streams[key]
                continue
            total += stream.num_tokens
        for key, stream in list(self._streams.items()):
            if total <= self._max_tokens:
                break
            if stream.ended is not None:
                total -= stream.num_tokens
                del self._streams[key]


MAX_REASON = 2000
"""Characters of an error message."""


class Submission:
    """A running submission."""

    __slots__ = ("attempt", "kept", "num_tokens", "num_unfinished", "peer", "request_id")

    def __init__(self, peer: Peer, attempt: int, request: Request) -> None:
        self.peer, self.attempt, self.request_id = peer, attempt, request.id
        committed = request.committed or ((),) * request.sampling.n
        self.num_tokens = [len(tokens or ()) for tokens in committed]
        """Output tokens by choice, including those that another worker committed."""
        self.num_unfinished = len(request.unfinished)
        self.kept: ResumableStream | None = None
        """Tokens of a resumable stream."""


@dataclass(slots=True)
class GatewaySession:
    last_message: float = 0.0
    """Time of the gateway's last message."""
    jobs: dict[int, Submission] = field(default_factory=dict)
    """Running submissions, by attempt."""
    outbox: deque[Outputs | RequestFailed] = field(default_factory=deque)
    """Messages that the send queue has not accepted yet. The tokens of the admitted requests bound its size."""
    _outputs: list[Output] = field(default_factory=list)
    """Outputs that are not in the outbox yet."""

    def add(self, job: Submission, event: OutputEvent) -> None:
        """Queue the event, unless its job ended or was cancelled. Outputs leave together, with the next `flush`."""
        if self.jobs.get(job.attempt) is not job:
            return
        if not isinstance(event, StepOutput):
            del self.jobs[job.attempt]
            self.fail(job.attempt, event)
            return
        choice, count = event.choice, len(event.tokens)
        start = job.num_tokens[choice]
        job.num_tokens[choice] = start + count
        if job.kept is not None:
            job.kept.add(choice, event.tokens)
        if event.finish_reason is not None:
            job.num_unfinished -= 1
            if job.num_unfinished == 0:
                del self.jobs[job.attempt]
        self._outputs.append(
            Output(
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
        )

    def fail(self, attempt: int, error: PacelineError) -> None:
        """Queue a `RequestFailed` for the attempt."""
        self._collect()
        field = error.field if isinstance(error, InvalidRequest) else None
        text = str(error)[:MAX_REASON].encode(errors="replace").decode()  # it may quote lone surrogates
        kind = FailureKind.LOST
        if isinstance(error, InvalidRequest | GenerationFailed):
            kind = FailureKind.INVALID if isinstance(error, InvalidRequest) else FailureKind.FAILED
        self.outbox.append(RequestFailed(attempt, kind, text, field))

    @property
    def attempts(self) -> list[int]:
        """Submissions that run, and those whose last message is not sent yet."""
        self._collect()
        unsent: set[int] = set()
        for message in self.outbox:
            unsent.update(
                [message.attempt] if isinstance(message, RequestFailed) else [o.attempt for o in message.outputs]
            )
        return sorted(unsent.union(self.jobs))

    def flush(self, send: Callable[[Outputs | RequestFailed], bool]) -> None:
        """Send queued messages in order, until `send` returns False."""
        self._collect()
        while self.outbox and send(self.outbox[0]):
            self.outbox.popleft()

    def _collect(self) -> None:
        """Put the outputs into the outbox, as one message."""
        outputs = self._outputs
        if outputs:
            self.outbox.extend(Outputs(outputs[i : i + MAX_OUTPUTS]) for i in range(0, len(outputs), MAX_OUTPUTS))
            self._outputs = []


logger = logging.getLogger(__name__)

WRONG_EPOCH = "the message is for another epoch of this worker"
GATEWAY_TIMEOUT = 10.0
"""Seconds without a message after which a gateway's requests are cancelled."""
CLOSE_SECONDS = 1.0
"""Part of a drain's time that is kept for the end: streams continue elsewhere, and the engine and the sockets close."""
PAUSE_SECONDS = 1.0
"""Time between two checks for silent gateways from which the worker itself was suspended."""
MAX_JOBS = 8192
"""Requests per gateway, far above a gateway's own admission limit."""


class GatewaySessions(dict[Peer, GatewaySession]):
    """Requests by gateway. The thread that owns the listener uses it."""

    def __init__(self, name: str, listener: Listener[FromGateway], clock: Clock) -> None:
        """`name` is the worker's."""
        super().__init__()
        self._name, self._listener, self._clock = name, listener, clock
        self._events: deque[tuple[Submission, OutputEvent]] = deque()
        self._is_awake = False
        self._last_check: float | None = None
        """Time of the last check for silent gateways."""
        self._drain_until: float | None = None
        """Time at which the remaining streams continue elsewhere. None if the worker does not drain."""

    def heard(self, peer: Peer) -> GatewaySession:
        """The requests of a gateway that has just sent a message."""
        gateway = self.setdefault(peer, GatewaySession())
        gateway.last_message = self._clock.now()
        return gateway

    def greet(self, peer: Peer, hello: Hello, welcome: Callable[[], Welcome]) -> None:
        """Answer a `Hello`. Without the epoch of `Welcome` a gateway of another version can submit nothing."""
        text = f"{self._name} has protocol version {VERSION}, not {hello.version}: upgrade the older one"
        self._listener.send(peer, welcome() if hello.version == VERSION else Goodbye(text))

    def accepts(self, gateway: GatewaySession, message: Submit, epoch: int) -> bool:
        """Whether the worker, in this epoch, can take the request. If not, its failure is queued."""
        error = None
        if message.epoch != epoch:  # sent to the previous process at this address
            error = WRONG_EPOCH
        elif self.is_draining:  # sent before the gateway knew
            error = f"{self._name} is draining"
        elif len(gateway.jobs) >= MAX_JOBS:
            error = f"the limit of {MAX_JOBS} requests per gateway is reached"
        elif message.attempt in gateway.jobs:  # A failure would end the first submission
            logger.warning("a gateway repeats the attempt %d, which is ignored", message.attempt)
            return False
        if error is not None:
            gateway.fail(message.attempt, PacelineError(error))
        return error is None

    def listener_of(self, job: Submission) -> Callable[[OutputEvent], None]:
        """Takes the outputs and the error of a request, from any thread, for `send_events`."""

        def listen(event: OutputEvent) -> None:
            self._events.append((job, event))
            if not self._is_awake:  # once for all outputs of a step
                self._is_awake = True
                self._listener.wake()

        return listen

    def send_events(self, on_error: Callable[[Submission], None] = lambda job: None) -> None:
        """Send what the listeners took, all outputs of a step in one message to each gateway, as far as the send queues accept
        it. `on_error` is called for a running request that failed."""
        self._is_awake = False  # before reading: an event that arrives from here on wakes the thread again
        while self._events:
            job, event = self._events.popleft()
            gateway = self.get(job.peer)
            if gateway is None:
                continue
            if not isinstance(event, StepOutput) and gateway.jobs.get(job.attempt) is job:
                on_error(job)
            gateway.add(job, event)
        for peer, gateway in self.items():
            gateway.flush(partial(self._listener.send, peer))

    def fail_silent(self) -> list[Peer]:
        """Gateways without a message for `GATEWAY_TIMEOUT`. Their requests fail, and a gateway that was suspended continues its
        streams when it returns. The caller drops them. Time in which the worker itself was suspended does not count: messages
        of that time wait in its queue."""
        now = self._clock.now()
        paused = 0.0 if self._last_check is None else now - self._last_check
        self._last_check = now
        if paused > PAUSE_SECONDS:
            for gateway in self.values():
                gateway.last_message = min(now, gateway.last_message + paused)
        silent = [peer for peer, gateway in self.items() if now - gateway.last_message > GATEWAY_TIMEOUT]
        for peer in silent:
            gateway = self[peer]
            logger.warning("a gateway is silent; its %d requests are cancelled", len(gateway.jobs))
            for attempt in gateway.jobs:
                gateway.fail(attempt, PacelineError(f"the gateway was silent for {GATEWAY_TIMEOUT:.0f} s"))
            gateway.flush(partial(self._listener.send, peer))
        return silent

    def say_goodbye(self, reason: str) -> None:
        for peer in self:
            self._listener.send(peer, Goodbye(reason))

    @property
    def is_draining(self) -> bool:
        return self._drain_until is not None

    def start_drain(self, seconds: float) -> None:
        """Accept no further requests. The running requests have `seconds` to finish."""
        self._drain_until = self._clock.now() + max(0.0, seconds - CLOSE_SECONDS)
        logger.info("draining: %d streams have %.1f s", sum(len(gateway.jobs) for gateway in self.values()), seconds)

    def is_drained(self, has_other_work: bool = False) -> bool:
        """Whether the worker drains, and nothing is left to do or the time is over."""
        if self._drain_until is None:
            return False
        has_work = has_other_work or any(gateway.attempts for gateway in self.values())
        return not has_work or self._clock.now() >= self._drain_until
