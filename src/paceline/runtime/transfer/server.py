"""The server side of transfers in a worker."""

import logging
import threading
from collections.abc import Sequence

import zmq

from paceline.runtime.transfer.channels.channel_pool import pick_channels
from paceline.runtime.transfer.channels.shared_memory import SharedMemoryListener
from paceline.runtime.transfer.channels.socket_channel import bind_server_socket
from paceline.runtime.transfer.messages import TransferHandle
from paceline.runtime.transfer.registry import Registry
from paceline.runtime.transfer.serve_loop import ServeLoop
from paceline.runtime.transfer.transfer import Transfer
from paceline.runtime.wire.curve import Authenticator
from paceline.runtime.wire.keys import Security
from paceline.runtime.wire.wakeup import Wakeup

logger = logging.getLogger(__name__)


class TransferServer:
    """Serves transfers to every client that presents their handle, from its own thread."""

    def __init__(self, host: str, security: Security | None, channels: Sequence[str] | None = None) -> None:
        """`host` is the address to bind, which clients must be able to reach. Without `security` it must be a loopback address.
        The server accepts the allowed keys and its own key, because workers of one role share a key. `channels` lists the
        channels to offer in addition to sockets, which every client uses for its requests. If it is None, `pick_channels`
        chooses them.
        """
        channels = pick_channels(channels, security)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = None
        if security is not None:
            allowed = security.allowed | {security.own.public}
            self._authenticator = Authenticator(self._context, allowed)
        self._shared_memory = SharedMemoryListener() if "memory" in channels else None
        try:
            self._socket = bind_server_socket(self._context, host, security)
        except BaseException:
            self._close_context()
            raise
        self.addresses = {"socket": self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")}
        if self._shared_memory is not None:
            self.addresses["memory"] = self._shared_memory.address
        if "nixl" in channels:
            self.addresses["nixl"] = "UCX"
        self._key = "" if security is None else security.own.public
        self._wakeup = Wakeup()
        self._registry = Registry(self._wakeup)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="paceline-transfer-server", daemon=True)
        self._thread.start()

    def offer(self, transfer: Transfer) -> TransferHandle:
        """The handle is valid until `withdraw`, for any number of clients."""
        return TransferHandle(self._registry.add(transfer), self.addresses, list(transfer.sizes), self._key)

    def withdraw(self, handle: TransferHandle) -> None:
        """Stop serving a transfer; open requests for it are refused. Its bytes may change from now on: a chunk that is still
        being sent then fails its checksum. A second call is no error."""
        self._registry.remove(handle.id)

    def close(self) -> None:
        """Withdraw every transfer and stop. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._wakeup.notify()
            self._thread.join()
            self._registry.clear()

    def _run(self) -> None:
        loop = ServeLoop(self._socket, self._registry, self._shared_memory, "nixl" in self.addresses)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.fd, zmq.POLLIN)
        if self._shared_memory is not None:
            poller.register(self._shared_memory.descriptor, zmq.POLLIN)
        try:
            while not self._is_closed:
                ready = dict(poller.poll(loop.poll_timeout_ms))
                if self._wakeup.fd in ready:
                    self._wakeup.clear()
                if self._shared_memory is not None and self._shared_memory.descriptor in ready:
                    loop.receive_local(self._shared_memory)
                loop.step()
        except Exception:
            logger.exception("the transfer server stopped: its transfers can no longer be fetched; restart the worker")
        finally:
            self._socket.close(0)
            self._wakeup.close()
            self._close_context()

    def _close_context(self) -> None:
        if self._shared_memory is not None:
            self._shared_memory.close()
        if self._authenticator:
            self._authenticator.close()
        self._context.term()
