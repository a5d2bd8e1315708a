"""The connections of a target to all draft workers of its pool."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from paceline.core.errors import PacelineError
from paceline.models.drafts.compatibility import Fingerprint
from paceline.runtime.draft_pool.connection import DraftAddress, DraftConnection
from paceline.runtime.wire.messages import Goodbye

logger = logging.getLogger(__name__)


class DraftConnections:
    """One connection per draft worker, by name. One thread writes; any thread may read `all`."""

    def __init__(self, tokenizer: Fingerprint, name: str, on_lost: Callable[[DraftConnection], None]) -> None:
        """`tokenizer` and `name` are those of the target. `on_lost` is called when no sequence is open at a worker any more."""
        self._tokenizer, self._name, self._on_lost = tokenizer, name, on_lost
        self._by_name: dict[str, DraftConnection] = {}

    @property
    def all(self) -> tuple[DraftConnection, ...]:
        return tuple(self._by_name.values())

    @property
    def has_ready(self) -> bool:
        """Whether a draft worker is connected."""
        return any(connection.is_ready for connection in self.all)

    def __getitem__(self, name: str) -> DraftConnection:
        return self._by_name[name]

    def are_to(self, workers: Iterable[DraftAddress]) -> bool:
        """Whether the connections are exactly those to `workers`, with the same workers on trial."""
        known = {name: connection.where for name, connection in self._by_name.items()}
        return {where.name: where for where in workers} == known

    def set_workers(self, workers: Iterable[DraftAddress]) -> None:
        """Connect to exactly these workers. Connections to workers that stay are kept."""
        wanted = {where.name: where for where in workers}
        kept = {
            name: connection
            for name, connection in self._by_name.items()
            if _is_same(wanted.get(name), connection.where)
        }
        for name, connection in kept.items():  # the end of a trial does not disconnect
            connection.where = wanted[name]
        for name, connection in self._by_name.items():
            if name not in kept:
                self._on_lost(connection)
                _disconnect(connection, "no longer in the cluster")
        for name, where in wanted.items():
            if name not in kept:
                try:
                    kept[name] = DraftConnection(where, self._tokenizer, self._name, self._on_lost)
                except PacelineError as error:
                    logger.error("draft worker %s is ignored: %s", name, error)
        self._by_name = kept

    def close(self) -> None:
        """Send `Goodbye` and close the connections."""
        for connection in self.all:
            _disconnect(connection, "target stops")


def _disconnect(connection: DraftConnection, reason: str) -> None:
    if connection.is_ready:
        connection.transport.send(Goodbye(reason))
    connection.close()


def _is_same(wanted: DraftAddress | None, known: DraftAddress) -> bool:
    return wanted is not None and replace(wanted, is_on_trial=known.is_on_trial) == known
