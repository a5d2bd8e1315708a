"""The giving side of a worker."""

import logging
import threading
from collections.abc import Sequence

import zmq

from paceline.runtime.transfer.channels.kinds import pick_kinds
from paceline.runtime.transfer.channels.sockets import giving_socket
from paceline.runtime.transfer.channels.windows import Windows
from paceline.runtime.transfer.handle import Ticket
from paceline.runtime.transfer.registry import Stock
from paceline.runtime.transfer.serve_loop import Clerk
from paceline.runtime.transfer.transfer import Parcel
from paceline.runtime.wire.keys import Security
from paceline.runtime.wire.wakeup import Bell
from paceline.runtime.wire.zap import Gatekeeper

logger = logging.getLogger(__name__)


class Depot:
    """Gives parcels to whoever shows their ticket, many takers in turn, from a thread of its own."""

    def __init__(self, host: str, security: Security | None, kinds: Sequence[str] | None = None) -> None:
        """`host`: the address of this machine to bind, which others reach it by; without `security` one that they cannot.
        Let in are the keys on the list, and this depot's own: workers of one role share theirs.
        `kinds` of transfer to offer beside sockets, which are how takers ask for anything; None: see `pick_kinds`.
        """
        kinds = pick_kinds(kinds, security)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gatekeeper = None
        if security is not None:
            allowed = security.allowed | {security.own.public}
            self._gatekeeper = Gatekeeper(self._context, allowed.__contains__)
        self._windows = Windows() if "memory" in kinds else None
        try:
            self._socket = giving_socket(self._context, host, security)
        except BaseException:
            self._hang_up()
            raise
        self.addresses = {"socket": self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")}
        if self._windows is not None:
            self.addresses["memory"] = self._windows.address
        if "nixl" in kinds:
            self.addresses["nixl"] = "UCX"
        self._key = "" if security is None else security.own.public
        self._bell = Bell()
        self._stock = Stock(self._bell)
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="paceline-depot", daemon=True)
        self._thread.start()

    def offer(self, parcel: Parcel) -> Ticket:
        """The ticket is good until it is withdrawn, for any number of takers."""
        return Ticket(self._stock.put(parcel), self.addresses, list(parcel.sizes), self._key)

    def withdraw(self, ticket: Ticket) -> None:
        """Nothing of it is given any more, and who still wanted some hears so. Its bytes may now change: what is under way
        arrives as corrupt then, and is refused. A ticket withdrawn twice is no error."""
        self._stock.remove(ticket.id)

    def close(self) -> None:
        """Everything is withdrawn."""
        if not self._is_over:
            self._is_over = True
            self._bell.ring()
            self._thread.join()
            self._stock.clear()

    def _run(self) -> None:
        clerk = Clerk(self._socket, self._stock, self._windows, "nixl" in self.addresses)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell.descriptor, zmq.POLLIN)
        if self._windows is not None:
            poller.register(self._windows.descriptor, zmq.POLLIN)
        try:
            while not self._is_over:
                ready = dict(poller.poll(clerk.pause_ms))
                if self._bell.descriptor in ready:
                    self._bell.quiet()
                if self._windows is not None and self._windows.descriptor in ready:
                    clerk.attend(self._windows)
                clerk.work()
        except Exception:
            logger.exception("the depot stopped: what it offered cannot be taken any more")
        finally:
            self._socket.close(0)
            self._bell.close()
            self._hang_up()

    def _hang_up(self) -> None:
        if self._windows is not None:
            self._windows.close()
        if self._gatekeeper:
            self._gatekeeper.close()
        self._context.term()
