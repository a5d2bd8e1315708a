"""The caches of all workers as a gateway knows them: a subscription for each worker, and the index that they feed."""

from functools import partial
from urllib.parse import urlsplit

from paceline.core.clock import Clock
from paceline.kv import PrefixSums
from paceline.policy.routing.kv_index import KvIndex
from paceline.wire.gateway_messages import Welcome
from paceline.wire.keys import KeyPair, Security
from paceline.wire.kv_subscriber import KvSubscriber
from paceline.wire.worker_spec import Member

POLL_SECONDS = 0.01
"""Interval between two reads: workers collect events for as long."""


class CacheTracker:
    """Used by one thread. A worker that is not tracked, or publishes no events, counts as empty."""

    def __init__(self, own: KeyPair | None, clock: Clock) -> None:
        self.index = KvIndex(PrefixSums())
        self._own = own
        self._clock = clock
        self._subscribers: dict[str, KvSubscriber] = {}
        self._epochs: dict[str, int] = {}
        self._last_read = 0.0

    def track(self, member: Member, welcome: Welcome) -> None:
        """Subscribe to a worker. A new epoch discards what was known of the worker."""
        if self._epochs.get(member.name) == welcome.epoch:
            return
        self.remove(member.name)
        self._epochs[member.name] = welcome.epoch
        if welcome.events_port and welcome.replay_port:
            host = urlsplit(member.address).netloc.rpartition(":")[0]
            security = None if self._own is None else Security(self._own, member.key)
            self.watch(
                member.name, f"tcp://{host}:{welcome.events_port}", f"tcp://{host}:{welcome.replay_port}", security
            )

    def watch(self, name: str, address: str, replay_address: str | None, security: Security | None = None) -> None:
        """Subscribe to the events at `address` under `name`, for example those of a vLLM server. It replaces an earlier
        subscription. Without a replay address, a lost batch discards what was known of the server."""
        sink = partial(self.index.apply, name)
        subscriber = KvSubscriber(address, replay_address, sink, self._clock, security)
        before, self._subscribers[name] = self._subscribers.get(name), subscriber
        if before is not None:
            before.close()

    def remove(self, name: str) -> None:
        """Unsubscribe and discard what was known of the worker."""
        self._epochs.pop(name, None)
        subscriber = self._subscribers.pop(name, None)
        if subscriber is not None:
            subscriber.close()
        self.index.clear(name)

    def receive(self) -> None:
        """Apply the events that have arrived. Never waits."""
        now = self._clock.now()
        if now - self._last_read >= POLL_SECONDS:
            self._last_read = now
            for subscriber in self._subscribers.values():
                subscriber.receive()

    def close(self) -> None:
        for name in list(self._subscribers):
            self.remove(name)
