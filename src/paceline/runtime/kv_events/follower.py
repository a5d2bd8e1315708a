"""A gateway's knowledge of all its workers' caches: a subscription for each, and the index they feed."""

from functools import partial
from urllib.parse import urlsplit

from paceline.cluster.routing.kv_index import KvIndex
from paceline.core.clock import Clock
from paceline.kv.prefix_sums import PrefixSums
from paceline.runtime.deploy.directory import Member
from paceline.runtime.kv_events.subscriber import KvSubscriber
from paceline.runtime.wire.keys import KeyPair, Security
from paceline.runtime.wire.stream_messages import Welcome

FRESH_SECONDS = 0.01
"""Workers gather events for as long: to look more often finds nothing."""


class CacheFollower:
    """Owned by one thread. A worker that is not followed, or publishes nothing, is taken to have nothing."""

    def __init__(self, own: KeyPair | None, clock: Clock) -> None:
        self.index = KvIndex(PrefixSums())
        self._own = own
        self._clock = clock
        self._subscribers: dict[str, KvSubscriber] = {}
        self._epochs: dict[str, int] = {}
        self._looked = 0.0

    def follow(self, member: Member, welcome: Welcome) -> None:
        """The worker is there. If it started anew, what was known of it is void."""
        if self._epochs.get(member.name) == welcome.epoch:
            return
        self.forget(member.name)
        self._epochs[member.name] = welcome.epoch
        if welcome.events_port and welcome.replay_port:
            host = urlsplit(member.address).netloc.rpartition(":")[0]
            security = None if self._own is None else Security(self._own, member.key)
            self.watch(
                member.name, f"tcp://{host}:{welcome.events_port}", f"tcp://{host}:{welcome.replay_port}", security
            )

    def watch(self, name: str, address: str, replay_address: str | None, security: Security | None = None) -> None:
        """Take the events at `address` for `name`'s, instead of any before: a stock vLLM server's, for one. Without the address
        of its replay socket, whatever is missed makes all known of it void."""
        sink = partial(self.index.apply, name)
        subscriber = KvSubscriber(address, replay_address, sink, self._clock, security)
        before, self._subscribers[name] = self._subscribers.get(name), subscriber
        if before is not None:
            before.close()

    def forget(self, name: str) -> None:
        self._epochs.pop(name, None)
        subscriber = self._subscribers.pop(name, None)
        if subscriber is not None:
            subscriber.close()
        self.index.clear(name)

    def receive(self) -> None:
        """Take in what the workers said. Never waits."""
        now = self._clock.now()
        if now - self._looked >= FRESH_SECONDS:
            self._looked = now
            for subscriber in self._subscribers.values():
                subscriber.receive()

    def close(self) -> None:
        for name in list(self._subscribers):
            self.forget(name)
