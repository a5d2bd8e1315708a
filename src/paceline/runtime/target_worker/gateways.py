"""The gateways of a worker: their requests, the messages to them, and the drain that ends their service."""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from paceline.core.clock import Clock
from paceline.core.errors import PacelineError
from paceline.core.output import OutputEvent, StepOutput
from paceline.runtime.target_worker.jobs import GatewaySession, Submission
from paceline.runtime.wire.gateway_messages import FromGateway, Submit
from paceline.runtime.wire.messages import VERSION, Goodbye, Hello
from paceline.runtime.wire.target_messages import Welcome
from paceline.runtime.wire.transport import Listener, Peer

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
