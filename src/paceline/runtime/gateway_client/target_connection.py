"""A gateway's line to one target worker: heartbeats, health, and what it last said about itself."""

from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.cluster.health.health import Pulse as HealthPulse
from paceline.cluster.health.health import WorkerHealth, WorkerState
from paceline.cluster.routing.router import WorkerLoad
from paceline.core.cluster_config import HealthConfig
from paceline.kernels.layout import BLOCK_SIZE
from paceline.runtime.deploy.directory import Member
from paceline.runtime.gateway_client.stream import Stream
from paceline.runtime.wire.keys import KeyPair, Security
from paceline.runtime.wire.messages import OLDEST, VERSION, Hello
from paceline.runtime.wire.report_messages import Report
from paceline.runtime.wire.stream_messages import TO_GATEWAY, Ask, Beat, FromTargetWorker, Pulse, Welcome
from paceline.runtime.wire.transport import Connection

REPORT_SECONDS = 1.0


class TargetLine:
    """Owned by one thread. Times are seconds on its clock."""

    def __init__(self, member: Member, health: HealthConfig, own: KeyPair | None, epoch: int) -> None:
        security = None if own is None else Security(own, member.key)
        self.member = member
        self.connection: Connection[FromTargetWorker] = Connection(member.address, TO_GATEWAY, security)
        self.monitor = self.connection.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        """Has something to read when the connection broke."""
        self.health = WorkerHealth(health)
        self.welcome: Welcome | None = None
        self.pulse: Pulse | None = None
        self.report: Report | None = None
        self.round_trip: float | None = None
        self.streams: dict[int, Stream] = {}
        """By attempt: what this worker generates for us."""
        self.state = WorkerState.STARTING
        """As of the last `beat`; whoever owns the line compares and acts."""
        self.next_canary = 0.0
        self.tokens = 0
        """What it generated for us, since we know it."""
        self.prompt_tokens = 0
        """Of the requests that it began to answer."""
        self.cached_tokens = 0
        """Of those, what its cache supplied."""
        self._config = health
        self._hello = Hello(VERSION, OLDEST, epoch, "")
        self._next_beat = 0.0
        self._next_report = 0.0
        self._others = 0
        """Sequences there that are not ours, as of the last pulse: other gateways send it work too."""
        self._nonce = 0
        self._asked: float | None = None
        """When the last beat left, on a line that was open."""

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def load(self) -> WorkerLoad:
        assert self.welcome is not None
        kv_use = self.pulse.kv_used / self.pulse.kv_total if self.pulse and self.pulse.kv_total else 0.0
        kv_tokens = self.pulse.kv_total * BLOCK_SIZE if self.pulse else 0
        return WorkerLoad(self.name, self._own + self._others, self.welcome.max_num_seqs, kv_use, kv_tokens)

    @property
    def _own(self) -> int:
        return sum(stream.num_unfinished for stream in self.streams.values())

    @property
    def is_usable(self) -> bool:
        return self.state is WorkerState.READY and self.welcome is not None

    @property
    def takes_streams(self) -> bool:
        """A prefill worker generates nothing but canaries."""
        return self.is_usable and self.member.role == "target"

    @property
    def is_loading(self) -> bool:
        """It takes requests, and answers them when the rest of its model is there."""
        return self.pulse is not None and self.pulse.loading is not None

    def beat(self, now: float) -> None:
        """Say what is due to be said, and look how the worker is. Call it after all that came was heard."""
        while self.monitor.poll(0):
            recv_monitor_message(self.monitor)
            self.health.cut()
        if now >= self._next_beat:
            self._next_beat = now + self._config.heartbeat
            if self.welcome is None:
                self.connection.send(self._hello)
            self._nonce += 1
            self._asked = None if self.welcome is None else now  # connecting takes longer than a round trip
            self.connection.send(Beat(self._nonce))
            if now >= self._next_report:
                self._next_report = now + REPORT_SECONDS
                self.connection.send(Ask())
        self.state = self.health.state(now)

    def heard(self, pulse: Pulse, now: float) -> bool:
        """Returns whether the worker started anew: what it generated for us is gone."""
        self.pulse = pulse
        self._others = max(0, pulse.running + pulse.waiting - self._own)
        if pulse.nonce == self._nonce and self._asked is not None:
            took = now - self._asked
            self.round_trip = took if self.round_trip is None else 0.8 * self.round_trip + 0.2 * took
        restarted = self.health.heard(HealthPulse(pulse.epoch, pulse.steps, pulse.busy), now)
        if self.welcome is not None and self.welcome.epoch != pulse.epoch:
            self.welcome = None
        return restarted

    def take_streams(self) -> Sequence[Stream]:
        """Those it had; from now on it has none."""
        streams, self.streams = list(self.streams.values()), {}
        for stream in streams:
            stream.worker = None
        return streams

    def close(self) -> None:
        self.connection.socket.disable_monitor()
        self.monitor.close(0)
        self.connection.close()
