"""Access of a target worker's thread to the proposer `pool`, which belongs to the engine's thread."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from paceline.core.errors import EngineClosed
from paceline.core.status import DrafterStatus, Symptom
from paceline.drafting.connection import DraftAddress
from paceline.drafting.proposer import PoolProposer
from paceline.drafting.trial import TrialChange
from paceline.engine import EngineLoop
from paceline.wire.gateway_messages import WorkerAddress
from paceline.wire.keys import KeyPair, Security


class PoolControl:
    """Runs commands for the proposer on the engine's thread, and reads its status."""

    def __init__(self, proposer: PoolProposer, loop: EngineLoop, own: KeyPair | None = None) -> None:
        """`own` is the key pair of this target. If it is None, connections are not encrypted."""
        self._proposer = proposer
        self._loop = loop
        self._own = own

    def set_workers(self, workers: Sequence[WorkerAddress]) -> None:
        """Use exactly these draft workers."""
        own = self._own
        addresses = [
            DraftAddress(w.name, w.address, None if own is None else Security(own, w.key), w.is_on_trial)
            for w in workers
        ]
        self._call(lambda: self._set_workers(addresses))

    def maintain(self) -> None:
        """Keep the connections alive while the engine is idle; during generation the proposer does it."""
        if not self._loop.engine.has_work:
            self._call(self._proposer.maintain)

    def drafters(self) -> Sequence[DrafterStatus]:
        return self._proposer.status().drafters

    def symptoms(self) -> Sequence[Symptom]:
        return self._proposer.status().symptoms

    def close(self) -> None:
        """Close the connections. Call it after the engine has stopped."""
        self._proposer.shut_down()

    def _set_workers(self, addresses: Sequence[DraftAddress]) -> None:
        """On the engine's thread. Acceptance is learned apart for a draft on trial; it stays if the draft is kept."""
        change = self._proposer.set_workers(addresses)
        speculator = self._loop.engine.speculator
        methods = [name for name, proposer in speculator.proposers.items() if proposer.traits is self._proposer.traits]
        if change is TrialChange.BEGUN:
            speculator.forget_trial(methods)
        elif change is TrialChange.KEPT:
            speculator.adopt_trial(methods)

    def _call(self, command: Callable[[], None]) -> None:
        with suppress(EngineClosed):
            self._loop.call(command)
