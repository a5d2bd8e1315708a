"""All sequences of the proposer `pool`, and the draft workers where they are open."""

from collections import defaultdict
from collections.abc import Iterable

from paceline.runtime.draft_pool.connection import DraftConnection
from paceline.runtime.draft_pool.sequence import PoolSequence
from paceline.speculation.proposer import SequenceProgress


class PoolSequences:
    """Sequences by id."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._by_id: dict[int, PoolSequence] = {}

    def update(self, progress: SequenceProgress) -> PoolSequence:
        """The sequence of this progress, which is new with its first progress."""
        sequence = self._by_id.get(progress.sequence_id)
        if sequence is None:
            sequence = self._by_id[progress.sequence_id] = PoolSequence(progress, self._vocab_size)
        sequence.progress = progress
        return sequence

    def get(self, sequence_id: int) -> PoolSequence | None:
        return self._by_id.get(sequence_id)

    def connection_of(self, sequence_id: int) -> DraftConnection | None:
        """The connection where a sequence is open. None if it is open nowhere, or if the sequence is not known."""
        sequence = self._by_id.get(sequence_id)
        return None if sequence is None else sequence.connection

    def open_at(self, connection: DraftConnection, sequence_id: int) -> PoolSequence | None:
        """The sequence with this id if it is open at that worker."""
        sequence = self._by_id.get(sequence_id)
        return sequence if sequence is not None and sequence.connection is connection else None

    def connections(self) -> list[DraftConnection | None]:
        """For every sequence the connection where it is open. Any thread may call it."""
        return [sequence.connection for sequence in list(self._by_id.values())]

    def unassign(self, connection: DraftConnection, sequence_ids: Iterable[int] | None = None) -> None:
        """These sequences, or all, are not open there any more. Their next draft request opens them again."""
        for sequence_id in list(self._by_id) if sequence_ids is None else sequence_ids:
            if (sequence := self.open_at(connection, sequence_id)) is not None:
                sequence.unassign()

    def finish_measuring(self) -> None:
        """End the measurement of goodput, because the next rounds are drafted by another draft or compared with another
        draft."""
        for sequence in self._by_id.values():
            sequence.finish_measuring()

    def remove(self, sequence_ids: Iterable[int]) -> dict[DraftConnection, list[int]]:
        """Forget sequences. Returns those that are open at a ready worker, by its connection."""
        opened: defaultdict[DraftConnection, list[int]] = defaultdict(list)
        for sequence_id in sequence_ids:
            sequence = self._by_id.pop(sequence_id, None)
            if sequence is None:
                continue
            sequence.finish_measuring()
            if (connection := sequence.connection) is not None and connection.is_ready:
                opened[connection].append(sequence_id)
        return opened
