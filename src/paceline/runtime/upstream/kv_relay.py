"""KV events of another engine's server, published again under the worker's address and keys."""

import secrets

from paceline.core.clock import Clock
from paceline.runtime.kv_events.publisher import KvPublisher
from paceline.runtime.kv_events.subscriber import KvSubscriber
from paceline.runtime.wire.keys import Security


class KvRelay:
    """Used by one thread, which calls `poll` often. Gateways see a worker that publishes its own events."""

    def __init__(
        self, name: str, host: str, address: str, replay_address: str | None, security: Security | None, clock: Clock
    ) -> None:
        """`host` is where to publish, as `tcp://host`. `address` is where the server publishes."""
        self._publisher = KvPublisher(f"{host}:0", f"{name}@{secrets.token_hex(8)}", security)
        self._subscriber = KvSubscriber(address, replay_address, self._publisher.put, clock)

    @property
    def port(self) -> int:
        return self._publisher.port

    @property
    def replay_port(self) -> int:
        return self._publisher.replay_port

    def poll(self) -> None:
        """Pass on what has arrived. Never waits."""
        self._subscriber.receive()

    def close(self) -> None:
        self._subscriber.close()
        self._publisher.close()
