"""A target worker's connections to prefill workers and peers, and the prompts requested from them."""

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from paceline.core.clock import Clock
from paceline.core.cluster_config import HealthConfig
from paceline.core.errors import PacelineError
from paceline.policy.health import WorkerState
from paceline.policy.routing.handoff import PrefillLoad
from paceline.targets import TargetConnection
from paceline.transfer import TransferClient
from paceline.wire.codec import MalformedMessage
from paceline.wire.draft_messages import VERSION, Goodbye
from paceline.wire.gateway_messages import (
    Cancel,
    FromTargetWorker,
    Heartbeat,
    Prefill,
    PrefillStarted,
    RequestFailed,
    Welcome,
    WorkerAddress,
)
from paceline.wire.keys import KeyPair, Security
from paceline.wire.transport import CommandQueue
from paceline.wire.worker_spec import Member
from paceline.worker.handoff.memory import PeerCaches, RemotePrompt

logger = logging.getLogger(__name__)

MAX_PROMPTS = 8
"""Prompts fetched at once."""
POLL_SECONDS = 0.05
IDLE_SECONDS = 60.0
"""Time after which an unused connection to a peer is closed: in a large cluster few pairs of targets share prefixes."""

OnEnd = Callable[[RemotePrompt, int], None]


class RecentPeers:
    """The peers that were used recently and should have a connection. Used by one thread."""

    def __init__(self) -> None:
        self._members: Mapping[str, Member] = {}
        self._last_use: dict[str, float] = {}

    def set_members(self, members: Mapping[str, Member]) -> None:
        """Replace all peers."""
        self._members = members

    def use(self, name: str, now: float) -> None:
        self._last_use[name] = now

    def members(self, now: float) -> dict[str, Member]:
        """Peers used within `IDLE_SECONDS`."""
        self._last_use = {name: at for name, at in self._last_use.items() if now - at < IDLE_SECONDS}
        return {name: self._members[name] for name in self._last_use if name in self._members}


class PrefillConnections:
    """Any thread may call `request`. Every requested prompt ends in one call of `on_end`, on this object's thread, with the
    number of its first blocks that are complete. From then on nothing writes to its blocks."""

    def __init__(
        self,
        on_end: OnEnd,
        own: KeyPair | None,
        channels: Sequence[str] | None,
        health: HealthConfig,
        clock: Clock,
        caches: PeerCaches,
    ) -> None:
        self.loads: tuple[PrefillLoad, ...] = ()
        """Loads of the usable prefill workers."""
        self._on_end = on_end
        self._own = own
        self._health = health
        self._clock = clock
        self._caches = caches
        self._client = TransferClient(None if own is None else Security(own), channels)
        self._epoch = secrets.randbits(62)
        self._prefill_workers: dict[str, Member] = {}
        self._peers = RecentPeers()
        self._peer_loads: dict[str, PrefillLoad] = {}
        """Loads of the usable peers."""
        self._attempts = itertools.count(1)
        self._connections: dict[str, TargetConnection] = {}
        self._invalid: set[Member] = set()
        """Members with an address or key that cannot be used."""
        self._requested: dict[int, RemotePrompt] = {}
        """Open prompts by attempt."""
        self._commands = CommandQueue()
        self._fetchers = ThreadPoolExecutor(MAX_PROMPTS, "paceline-fetch")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-prefill-connections", daemon=True)
        self._thread.start()

    def set_workers(self, workers: Sequence[WorkerAddress], peers: Sequence[WorkerAddress] = ()) -> None:
        """Replace the prefill workers and the peers, which are targets with cached prefixes."""
        prefill_workers = {w.name: Member(w.name, "prefill", "prefill", w.address, w.key) for w in workers}
        targets = {w.name: Member(w.name, "target", "target", w.address, w.key) for w in peers}
        self._commands.put(lambda: self._set_members(prefill_workers, targets))

    def peer(self, name: str) -> PrefillLoad | None:
        """The load of a peer. None if it is not usable. Any thread may call it. The first call opens a connection."""
        self._commands.put(lambda: self._peers.use(name, self._clock.now()))
        return self._peer_loads.get(name)

    def request(self, prompt: RemotePrompt) -> None:
        """Send the prompt to its worker."""
        self._commands.put(lambda: self._send_request(prompt))

    def wake(self) -> None:
        """Process prompts that were stopped."""
        self._commands.put(lambda: None)

    def close(self) -> None:
        """All requested prompts must have been stopped before. `on_end` is not called for those still in flight."""
        self._stop.set()
        self._commands.put(lambda: None)
        self._thread.join()
        self._fetchers.shutdown()
        self._client.close()
        self._caches.close()
        self._commands.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._step()
            except Exception:  # prompts wait for this thread: it must continue
                logger.exception("error in the connections to prefill workers; retrying")
                self._stop.wait(POLL_SECONDS)
        for connection in self._connections.values():
            connection.send(Goodbye("this worker is stopping"))
            connection.close()

    def _step(self) -> None:
        self._commands.wait([connection.socket for connection in self._connections.values()], POLL_SECONDS)
        self._commands.run_all()
        for connection in list(self._connections.values()):
            while (message := connection.receive()) is not None:
                self._process(connection, message)
        self._update(self._clock.now())

    def _set_members(self, prefill_workers: dict[str, Member], peers: dict[str, Member]) -> None:
        self._prefill_workers = prefill_workers
        self._peers.set_members(peers)

    def _connect(self, members: Mapping[str, Member]) -> None:
        """Open connections to these members and close all other connections."""
        for name, connection in list(self._connections.items()):
            if members.get(name) != connection.member:
                del self._connections[name]
                self._fail_prompts(connection, "left the cluster")
                connection.close()
        for name, member in members.items():
            if name not in self._connections and member not in self._invalid:
                try:
                    self._connections[name] = TargetConnection(member, self._health, self._own, self._epoch)
                except PacelineError as error:
                    self._invalid.add(member)
                    logger.error("worker %s is ignored: %s", name, error)

    def _update(self, now: float) -> None:
        """Update connections, health and loads, and end prompts past their deadline."""
        self._connect(self._prefill_workers | self._peers.members(now))
        for connection in self._connections.values():
            before = connection.state
            connection.poll(now)
            if connection.state is not before:
                logger.info("%s worker %s %s", connection.member.role, connection.name, connection.condition)
                if connection.state is WorkerState.SUSPECTED:
                    self._fail_prompts(connection, "does not answer")
        usable = [
            connection
            for connection in self._connections.values()
            if connection.is_usable and not connection.is_loading
        ]
        self.loads = tuple(
            PrefillLoad(
                connection.name,
                connection.heartbeat.prompt_tokens,
                connection.round_trip or 0.0,
                connection.welcome.max_model_len,
            )
            for connection in usable
            if connection.member.role == "prefill"
            and connection.heartbeat is not None
            and connection.welcome is not None
        )
        # A peer sends cached blocks at once, whatever it has to compute
        self._peer_loads = {
            connection.name: PrefillLoad(connection.name, 0, connection.round_trip or 0.0)
            for connection in usable
            if connection.member.role == "target"
        }
        for prompt in list(self._requested.values()):
            if now >= prompt.deadline:
                prompt.fail(f"it took longer than {prompt.deadline - prompt.requested:.1f} s")
            self._end_if_stopped(prompt)

    def _process(self, connection: TargetConnection, message: FromTargetWorker | MalformedMessage) -> None:
        match message:
            case Heartbeat():
                if connection.handle_heartbeat(message, self._clock.now()):
                    self._fail_prompts(connection, "restarted")
            case Welcome():
                if message.version == VERSION:
                    connection.welcome = message
                    self._caches.can_open(message.memory)  # now: the first prompt need not wait for it
            case PrefillStarted():
                prompt = self._unanswered(message.attempt)
                if prompt is not None:
                    prompt.has_started = True
                    self._fetchers.submit(self._fetch, prompt, message)
            case RequestFailed():
                prompt = self._unanswered(message.attempt)
                if prompt is not None:
                    prompt.fail(message.message)
                    self._end_if_stopped(prompt)
            case Goodbye():
                self._fail_prompts(connection, "is stopping")
                connection.welcome = None
            case MalformedMessage():
                logger.warning("%s sent an invalid message: %s", connection.name, message)

    def _send_request(self, prompt: RemotePrompt) -> None:
        connection, incoming = self._connections.get(prompt.worker), prompt.incoming
        assert incoming is not None
        plan = incoming.plan
        if connection is not None and connection.welcome is not None:
            plan = incoming.plan = replace(plan, in_place=self._caches.can_open(connection.welcome.memory))
        prompt.attempt = next(self._attempts)
        self._requested[prompt.attempt] = prompt
        is_sent = (
            connection is not None
            and connection.welcome is not None
            and connection.send(
                Prefill(
                    epoch=connection.welcome.epoch,
                    attempt=prompt.attempt,
                    ids=list(prompt.ids[: plan.num_tokens]),
                    salt=prompt.request.cache_salt,
                    first=plan.first,
                    layout=plan.layout.name,
                    state_layers=list(plan.state_layers),
                    state_rows=plan.state_rows,
                    in_place=plan.in_place,
                )
            )
        )
        if not is_sent:
            prompt.fail("it is not reachable")
        self._end_if_stopped(prompt)

    def _unanswered(self, attempt: int) -> RemotePrompt | None:
        """The prompt of this attempt, if the worker has not answered it."""
        prompt = self._requested.get(attempt)
        return None if prompt is None or prompt.has_started else prompt

    def _fail_prompts(self, connection: TargetConnection, reason: str) -> None:
        for prompt in list(self._requested.values()):
            if prompt.worker == connection.name:
                prompt.fail(f"it {reason}")
                self._end_if_stopped(prompt)

    def _end_if_stopped(self, prompt: RemotePrompt) -> None:
        """End a stopped prompt without a fetch; a fetch in progress ends it itself."""
        if prompt.stop.is_set() and not prompt.has_started:
            assert prompt.incoming is not None
            self._end(prompt, prompt.incoming.plan.first)

    def _fetch(self, prompt: RemotePrompt, started: PrefillStarted) -> None:
        """On a thread of the pool."""
        seconds = max(0.0, prompt.deadline - self._clock.now())
        num_blocks = prompt.fetch(self._client, started.handle, seconds, lambda: self._caches.open(started.cache))
        self._commands.put(lambda: self._end(prompt, num_blocks))

    def _end(self, prompt: RemotePrompt, num_blocks: int) -> None:
        del self._requested[prompt.attempt]
        connection = self._connections.get(prompt.worker)
        if connection is not None:
            connection.send(Cancel([prompt.attempt]))
        self._on_end(prompt, num_blocks)
