"""A client's channels to servers: which channel to use, and idle ones kept for the next fetch."""

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from paceline.core.cluster_config import TransferSetting
from paceline.core.errors import InvalidConfig, MissingDependency
from paceline.transfer import nixl as nixl_agent
from paceline.transfer import shared_memory
from paceline.transfer.nixl import NixlAgent, NixlChannel
from paceline.transfer.shared_memory import SharedMemoryChannel
from paceline.transfer.socket import ServerConnection, SocketChannel
from paceline.transfer.transfer import Channel, ChannelUnavailable, TransferFailed
from paceline.wire.keys import KeyPair, Security
from paceline.wire.transfer_messages import TransferHandle

CHANNELS = ("memory", "nixl", "socket")
"""Channels, best first. Every worker has `socket`."""
MAX_IDLE_CHANNELS = 8
"""Most idle channels in all. Each channel may hold a segment of memory."""
RETRY_SECONDS = 60.0
"""Time before a channel that did not reach a server is tried there again."""


def channels_for(setting: TransferSetting) -> Sequence[str] | None:
    """The argument of `pick_channels` for the setting `transfer` of a cluster."""
    return {"auto": None, "nixl": CHANNELS, "socket": ("socket",)}[setting]


def pick_channels(wanted: Sequence[str] | None, security: Security | None) -> tuple[str, ...]:
    """The channels `wanted`, best first. Raises if one of them is not available on this machine.

    If `wanted` is None, these are all available channels, but NIXL only without `security`. NIXL does not encrypt, so a cluster
    with keys must name it.
    """
    if wanted is None:
        has_nixl = security is None and nixl_agent.is_installed()
        available = {"memory": shared_memory.is_available(), "nixl": has_nixl, "socket": True}
        return tuple(name for name in CHANNELS if available[name])
    for name in wanted:
        if name not in CHANNELS:
            raise InvalidConfig(f"there is no transfer channel {name!r}: choose from {', '.join(CHANNELS)}")
    if "memory" in wanted and not shared_memory.is_available():
        raise InvalidConfig("transfer by shared memory needs Linux: leave out `memory` and use `socket`")
    if "nixl" in wanted and not nixl_agent.is_installed():
        raise MissingDependency("nixl", "transfer by NIXL", "transfer")
    return tuple(name for name in CHANNELS if name in wanted)


class _Server(NamedTuple):
    address: str
    key: str


class _Unreachable(NamedTuple):
    reason: str
    until: float


class ChannelPool:
    """Any thread may acquire a channel. It then belongs to that thread until `release` or its own `close`."""

    def __init__(self, security: Security | None, channels: Sequence[str] | None) -> None:
        self._names = pick_channels(channels, security)
        self._own: KeyPair | None = None if security is None else security.own
        self._idle: list[tuple[_Server, Channel]] = []
        """Idle channels, the most recently used last."""
        self._unreachable: dict[tuple[_Server, str], _Unreachable] = {}
        """Channels that recently did not reach a server."""
        self._agent: NixlAgent | None = None
        """NIXL agent, created for the first NIXL channel because it takes a moment."""
        self._is_closed = False
        self._lock = threading.Lock()
        self._agent_lock = threading.Lock()

    def __len__(self) -> int:
        """Number of idle channels."""
        return len(self._idle)

    def acquire(self, handle: TransferHandle) -> Channel:
        """An idle channel to the handle's server, or else a new channel: the best that client and server have and that reaches
        the server."""
        if (self._own is None) != (not handle.key):
            difference = (
                "the transfer server has no key and this worker has one"
                if self._own
                else "the transfer server has a key and this worker has none"
            )
            raise TransferFailed(f"{difference}: give keys to all workers, or to none")
        self._close_broken()
        server = _server_of(handle)
        with self._lock:
            for at in reversed(range(len(self._idle))):
                if self._idle[at][0] == server:
                    return self._idle.pop(at)[1]
        return self._open_best(handle)

    def release(self, handle: TransferHandle, channel: Channel) -> None:
        """Keep a working channel without open requests for the next fetch."""
        with self._lock:
            self._idle.append((_server_of(handle), channel))
            surplus = self._idle if self._is_closed else self._idle[:-MAX_IDLE_CHANNELS]
            self._idle = self._idle[len(surplus) :]
        for _, channel in surplus:
            channel.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            self._agent = None
        for _, channel in idle:
            channel.close()

    def _close_broken(self) -> None:
        with self._lock:
            broken = [channel for _, channel in self._idle if channel.is_broken()]
            self._idle = [(server, channel) for server, channel in self._idle if channel not in broken]
        for channel in broken:
            channel.close()

    def _open_best(self, handle: TransferHandle) -> Channel:
        reason = (
            f"no common channel: the server offers {', '.join(handle.addresses)} and this worker uses "
            f"{', '.join(self._names)}; set `transfer` alike on both"
        )
        for name in self._names:
            if name not in handle.addresses:
                continue
            key, now = (_server_of(handle), name), time.monotonic()
            with self._lock:
                self._unreachable = {key: entry for key, entry in self._unreachable.items() if now < entry.until}
                unreachable = self._unreachable.get(key)
            if unreachable is not None:
                reason = unreachable.reason
                continue
            try:
                return self._open(name, handle)
            except ChannelUnavailable as unavailable:
                reason = str(unavailable)
                with self._lock:
                    self._unreachable[key] = _Unreachable(reason, now + RETRY_SECONDS)
        raise TransferFailed(reason)

    def _open(self, name: str, handle: TransferHandle) -> Channel:
        if name == "memory":
            return SharedMemoryChannel(handle.addresses[name])
        agent = self._get_agent() if name == "nixl" else None
        connection = ServerConnection(handle.addresses.get("socket", ""), self._own, handle.key)
        return SocketChannel(connection) if agent is None else NixlChannel(agent, connection)

    def _get_agent(self) -> NixlAgent:
        with self._agent_lock:
            if self._agent is None:
                self._agent = NixlAgent("client")
            return self._agent


def _server_of(handle: TransferHandle) -> _Server:
    return _Server(handle.addresses.get("socket", ""), handle.key)
