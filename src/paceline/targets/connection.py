"""The gateway's connection to one target worker: heartbeats, health, and the worker's last status."""

from collections.abc import Sequence

import zmq

from paceline.core.cluster_config import HealthConfig
from paceline.core.sequence import BLOCK_SIZE
from paceline.core.status import EngineStatus
from paceline.policy.health import StepProgress, WorkerHealth, WorkerState
from paceline.policy.routing.router import WorkerLoad
from paceline.targets.stream import Stream
from paceline.wire.codec import MalformedMessage
from paceline.wire.draft_messages import VERSION, Hello
from paceline.wire.gateway_messages import (
    TO_GATEWAY,
    EncodedSubmit,
    FromGateway,
    FromTargetWorker,
    Heartbeat,
    HeartbeatRequest,
    StatusReport,
    StatusRequest,
    Submit,
    Welcome,
)
from paceline.wire.keys import KeyPair, Security
from paceline.wire.link import LinkRules, PeerLink
from paceline.wire.worker_spec import Member

STATUS_SECONDS = 0.5
"""Interval of status requests, and the largest age of the metrics of a worker."""


class TargetConnection:
    """Used by one thread, the pool's. Times are seconds on its clock."""

    def __init__(self, member: Member, health: HealthConfig, own: KeyPair | None, epoch: int) -> None:
        security = None if own is None else Security(own, member.key)
        self.member = member
        self.health = WorkerHealth(health)
        self.state = WorkerState.JOINING
        """State as of the last `poll`."""
        self.welcome: Welcome | None = None
        self.heartbeat: Heartbeat | None = None
        self.report: StatusReport | None = None
        self.refusal = ""
        """Why its handshake failed, if it did."""
        self.round_trip: float | None = None
        self.streams: dict[int, Stream] = {}
        """Streams that this worker generates, by attempt."""
        self._first_nonces: dict[int, int] = {}
        """Nonce of the first heartbeat that knows the submission, by attempt."""
        self.next_canary = 0.0
        self.num_tokens = 0
        """Output tokens received."""
        self.num_prompt_tokens = 0
        """Prompt tokens of the streams that the worker has started."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the worker's cache."""
        self._link: PeerLink[FromTargetWorker] = PeerLink(
            member.address,
            TO_GATEWAY,
            security,
            Hello(VERSION, epoch, None),
            HeartbeatRequest,
            LinkRules(health.heartbeat, health.heartbeat, pings_with_hello=True),
            self.health.liveness,
        )
        self._next_status = 0.0
        self._num_foreign = 0
        """Sequences of other gateways there, as of the last heartbeat."""

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def status(self) -> EngineStatus | None:
        """The last status that the worker reported."""
        return None if self.report is None else self.report.status

    @property
    def load(self) -> WorkerLoad:
        assert self.welcome is not None
        heartbeat = self.heartbeat
        kv_use = heartbeat.kv_used / heartbeat.kv_total if heartbeat and heartbeat.kv_total else 0.0
        kv_tokens = heartbeat.kv_total * BLOCK_SIZE if heartbeat else 0
        return WorkerLoad(self.name, self._num_own + self._num_foreign, self.welcome.max_num_seqs, kv_use, kv_tokens)

    @property
    def _num_own(self) -> int:
        return sum(stream.num_unfinished for stream in self.streams.values())

    @property
    def is_usable(self) -> bool:
        return self.state is WorkerState.READY and self.welcome is not None

    @property
    def is_draining(self) -> bool:
        """Whether it takes no new streams and exits soon, by its own account or by that of the directory."""
        return self.member.phase == "draining" or (self.heartbeat is not None and self.heartbeat.is_draining)

    @property
    def condition(self) -> str:
        """Its state as a predicate, for logs. A worker that drains closes its connection, and is not suspected for it."""
        if self.state is not WorkerState.SUSPECTED or not self.is_draining:
            return f"is {self.state.value}"
        return "has exited while draining" if self.health.is_disconnected else "does not answer while it drains"

    @property
    def takes_streams(self) -> bool:
        """Whether streams may be assigned to it. A prefill worker, and a worker on trial, generates canaries only."""
        return (
            self.is_usable and self.member.role == "target" and self.member.phase == "serving" and not self.is_draining
        )

    @property
    def is_overloaded(self) -> bool:
        """Whether its memory is so full that it refuses new streams."""
        return self.heartbeat is not None and self.heartbeat.is_overloaded

    @property
    def has_suspect(self) -> bool:
        """Whether it starts a request that another worker died of."""
        return any(stream.is_suspect and not stream.has_started for stream in self.streams.values())

    @property
    def is_loading(self) -> bool:
        """Whether layers of the model are still missing. Requests are accepted and wait for them."""
        return self.heartbeat is not None and self.heartbeat.loading is not None

    @property
    def socket(self) -> "zmq.Socket[bytes]":
        """Socket to wait on."""
        return self._link.connection.socket

    def submit(self, message: Submit | EncodedSubmit, stream: Stream) -> bool:
        """Returns False if the send queue is full."""
        self.streams[message.attempt] = stream
        self._first_nonces[message.attempt] = self._link.nonce + 1
        return self.send(message)

    def send(self, message: FromGateway | EncodedSubmit) -> bool:
        """Returns False if the send queue is full."""
        return self._link.send(message)

    def receive(self) -> FromTargetWorker | MalformedMessage | None:
        return self._link.receive()

    def poll(self, now: float) -> None:
        """Send the heartbeat and status requests that are due, and update `state`. Call it after all messages are read."""
        self._link.poll()
        if self._link.send_due(now, self.welcome is not None) is not None and now >= self._next_status:
            self._next_status = now + STATUS_SECONDS
            self.send(StatusRequest())
        self.state = self.health.state(now)

    def handle_heartbeat(self, heartbeat: Heartbeat, now: float) -> bool:
        """Returns whether the worker has restarted since the last heartbeat and lost its streams."""
        self.heartbeat = heartbeat
        self._num_foreign = max(0, heartbeat.running + heartbeat.waiting - self._num_own)
        seconds = self._link.round_trip(heartbeat.nonce, now)
        if seconds is not None:
            self.round_trip = seconds if self.round_trip is None else 0.8 * self.round_trip + 0.2 * seconds
        progress = StepProgress(heartbeat.epoch, heartbeat.steps, heartbeat.is_busy, heartbeat.step_seconds)
        restarted = self.health.heartbeat(progress, now)
        if self.welcome is not None and self.welcome.epoch != heartbeat.epoch:
            self.welcome = None
        return restarted

    def take_lost_streams(self, heartbeat: Heartbeat) -> Sequence[Stream]:
        """Remove and return the streams that the worker should have and does not have, by its own account."""
        self._first_nonces = {
            stream: self._first_nonces[stream] for stream in self.streams if stream in self._first_nonces
        }
        alive = set(heartbeat.attempts)
        lost = [
            attempt
            for attempt in self.streams
            if attempt not in alive and heartbeat.nonce >= self._first_nonces.get(attempt, 0)
        ]
        return [self.streams.pop(attempt) for attempt in lost]

    def remove_streams(self) -> Sequence[Stream]:
        """Remove and return all streams."""
        streams, self.streams = list(self.streams.values()), {}
        for stream in streams:
            stream.worker = None
        return streams

    def close(self) -> None:
        self._link.close()
