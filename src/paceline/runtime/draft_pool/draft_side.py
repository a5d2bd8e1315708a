"""A target worker's dealings with the draft pool, besides drafting."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from paceline.core.errors import EngineClosed
from paceline.engine.loop import EngineLoop
from paceline.runtime.draft_pool.connection import DraftAddress, State
from paceline.runtime.draft_pool.proposer import PoolProposer
from paceline.runtime.wire.keys import KeyPair, Security
from paceline.runtime.wire.report_messages import DrafterRecord, SymptomRecord
from paceline.runtime.wire.stream_messages import DrafterAddress

STATES = {State.UP: "ready", State.GREETING: "starting", State.AWAY: "suspected"}


class PoolSide:
    """Hands what gateways say about draft workers to the engine's thread, which owns the proposer."""

    def __init__(self, proposer: PoolProposer, loop: EngineLoop, own: KeyPair | None = None) -> None:
        self._proposer = proposer
        self._loop = loop
        self._own = own

    def set_workers(self, workers: Sequence[DrafterAddress]) -> None:
        own = self._own
        known = [DraftAddress(w.name, w.address, None if own is None else Security(own, w.key)) for w in workers]
        self._call(lambda: self._proposer.set_workers(known))

    def tend(self) -> None:
        if not self._loop.engine.has_work:  # otherwise drafting does
            self._call(self._proposer.tend)

    def drafters(self) -> Sequence[DrafterRecord]:
        return [
            DrafterRecord(
                name=link.name,
                state=STATES[link.state],
                sequences=link.sequences,
                queue_seconds=link.queue,
                round_trip=link.round_trip or 0.0,
                answers=link.counts.rounds,
                hits=link.counts.ready,
                late=link.counts.late,
                pass_seconds=link.pass_seconds,
                resting=link.resting,
            )
            for link in self._proposer.snapshot().links
        ]

    def symptoms(self) -> Sequence[SymptomRecord]:
        return [
            SymptomRecord(symptom.name, symptom.figure, symptom.limit, symptom.remedy)
            for symptom in self._proposer.snapshot().symptoms
        ]

    def close(self) -> None:
        """After the engine has stopped."""
        self._proposer.shut_down()

    def _call(self, command: Callable[[], None]) -> None:
        with suppress(EngineClosed):
            self._loop.call(command)
