"""The proposer `pool`: drafts come from draft workers over the network. A failure there costs speed, never correctness."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.cluster.pairing.pairing import is_worth_waiting
from paceline.core.clock import Clock, WallClock
from paceline.core.errors import PacelineError
from paceline.core.worker_status import DrafterStatus, Symptom
from paceline.models.drafts.compatibility import Fingerprint
from paceline.runtime.draft_pool.arms import DraftArms, TrialChange
from paceline.runtime.draft_pool.connection import DraftAddress, DraftConnection
from paceline.runtime.draft_pool.drafts import DraftChain, to_draft_batch
from paceline.runtime.draft_pool.sequence import PoolSequence
from paceline.runtime.wire.messages import (
    MAX_BATCH,
    Advance,
    Branches,
    Busy,
    Close,
    Drafts,
    Error,
    ErrorCode,
    FromDraft,
    Goodbye,
    RoundRequest,
)
from paceline.runtime.wire.transport import wait_any
from paceline.speculation.drafts import DraftBatch, DraftCost, merge_batches
from paceline.speculation.proposer import Progress, Proposer, ProposerTraits

logger = logging.getLogger(__name__)

IDLE_WAIT_SECONDS = 0.01
"""Time that an idle target waits for the answer to a ping, about every two seconds."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    drafters: tuple[DrafterStatus, ...]
    symptoms: tuple[Symptom, ...]
    steps: int
    wait_seconds: float
    undrafted: int
    """Rounds whose draft did not arrive in time."""


class PoolProposer:
    """Opens every sequence at the draft worker that answers soonest, and at another one after a loss.

    `fallback` drafts for sequences that are open nowhere. All methods but `status` belong to one thread, the engine's.
    """

    def __init__(
        self,
        workers: Iterable[DraftAddress],
        tokenizer: Fingerprint,
        vocab_size: int,
        name: str = "",
        fallback: Proposer | None = None,
        clock: Clock | None = None,
        verifies_trees: bool = False,
    ) -> None:
        """`workers`: those known now; `set_workers` replaces them. `tokenizer`: the target's, which drafts must share.
        `verifies_trees`: whether workers send alternatives to the tokens of their chains, which are verified beside them."""
        self.traits = ProposerTraits(
            is_tree=verifies_trees, can_miss_steps=True, label=self._label, is_available=self._is_available
        )
        self._arms = DraftArms()
        self._tokenizer, self._vocab_size, self._name = tokenizer, vocab_size, name
        self._fallback, self._clock = fallback, clock or WallClock()
        self._connections: dict[str, DraftConnection] = {}
        self._sequences: dict[int, PoolSequence] = {}
        self._steps = self._undrafted = 0
        self._wait_seconds = 0.0
        self._step_started, self._step_waited = 0.0, 0.0
        """Time of the last `observe`, and the time that the step waited for drafts since."""
        self.set_workers(workers)

    @property
    def connections(self) -> tuple[DraftConnection, ...]:
        return tuple(self._connections.values())

    def set_workers(self, workers: Iterable[DraftAddress]) -> TrialChange:
        """Use these workers and no others; connections to workers that stay are kept."""
        wanted = {where.name: where for where in workers}
        if wanted != {name: one.where for name, one in self._connections.items()}:
            for sequence in self._sequences.values():  # what follows counts for another draft, or beside another one
                sequence.finish_measuring()
        kept = {name: one for name, one in self._connections.items() if _is_same(wanted.get(name), one.where)}
        for name, connection in kept.items():  # the end of a trial does not disconnect
            connection.where = wanted[name]
        for name, connection in self._connections.items():
            if name not in kept:
                self._unassign(connection)
                if connection.is_ready:
                    connection.transport.send(Goodbye("no longer in the cluster"))
                connection.close()
        for name, where in wanted.items():
            if name not in kept:
                try:
                    kept[name] = DraftConnection(where, self._tokenizer, self._name, self._unassign)
                except PacelineError as error:
                    logger.error("draft worker %s is ignored: %s", name, error)
        self._connections = kept
        change = self._arms.set_connections(self.connections)
        self.maintain()
        return change

    def maintain(self) -> None:
        """Keep the connections alive while the engine is idle, and measure round trips now and then."""
        now = self._maintain()
        awaited = [one.transport for one in self.connections if one.needs_awaited_ping(now)]
        if awaited:
            wait_any(awaited, IDLE_WAIT_SECONDS)
            self._receive(was_awaited=True)

    def observe(self, batch: Sequence[Progress]) -> None:
        now = self._maintain()
        step_seconds = max(0.0, now - self._step_started - self._step_waited)
        self._step_started, self._step_waited = now, 0.0
        requests: defaultdict[DraftConnection, list[RoundRequest]] = defaultdict(list)
        max_depths: dict[DraftConnection, int] = {}
        for progress in batch:
            sequence = self._sequences.get(progress.sequence_id)
            if sequence is None:
                sequence = self._sequences[progress.sequence_id] = PoolSequence(progress, self._vocab_size)
            sequence.progress = progress
            sequence.measure_round(step_seconds, self._draft_of(sequence))
            sequence.requested, sequence.chain = 0, None
            if progress.depth == 0:
                sequence.offered = ()
            elif (connection := sequence.connection or self._assign(sequence, now)) is not None:
                arm = self._arms.of(connection)
                if sequence.offered and (committed := sequence.committed):
                    arm.statistics.observe_round(len(sequence.offered), len(committed) - 1)
                    if self.traits.is_tree:
                        arm.split.observe(sequence.offered, sequence.offered_alternatives, committed)
                if connection not in max_depths:
                    max_depths[connection] = arm.statistics.max_depth(connection)
                depth, num_alternatives = self._shape(sequence, max_depths[connection])
                requests[connection].append(sequence.start_round(depth, now, num_alternatives))
        for connection, rounds in requests.items():
            send_ahead = self._arms.of(connection).statistics.wants_branches(connection)
            for start in range(0, len(rounds), MAX_BATCH):
                connection.send(Advance(connection.epoch, rounds[start : start + MAX_BATCH], send_ahead), now)
        if batch:  # also for plain steps: a symptom stays visible while the circuit breaker is open
            self._arms.check(self.connections, now)
        if self._fallback is not None:
            self._fallback.observe(
                [_as_chain(one) for one in batch if self._sequences[one.sequence_id].connection is None]
            )

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        started = self._receive()
        if deadline > started:
            self._arms.observe_step(deadline - started)
        sequences = [sequence for i in sequence_ids if (sequence := self._sequences.get(i)) is not None]
        requested = [sequence for sequence in sequences if sequence.requested]
        trip = max(
            (one.connection.trip_seconds for one in requested if one.chain is None and one.connection is not None),
            default=0.0,
        )
        self._wait(requested, deadline)
        waited = self._clock.now() - started
        self._steps += 1
        self._wait_seconds += waited
        self._step_waited = waited
        for sequence in requested:
            arrived = sequence.received_at if sequence.chain is not None else started + waited
            sequence.measured.wait = max(0.0, arrived - started)
        cost = DraftCost(network_seconds=min(trip, waited))  # the wait for the round trip, without drafting
        chains: dict[int, DraftChain] = {}
        for sequence in sequences:
            if sequence.chain is not None and sequence.chain.tokens:
                chains[sequence.progress.sequence_id] = sequence.chain
                sequence.offered, sequence.offered_alternatives = sequence.chain.tokens, sequence.chain.alternatives
                sequence.requested, sequence.chain = 0, None
            elif sequence.requested:
                self._undrafted += 1
                sequence.requested = 0
                if sequence.connection is not None:
                    sequence.connection.check_alive(started)
        self._draft_with_fallback(chains, [one for one in sequences if one.connection is None], deadline)
        return replace(self._draft_batch(chains), cost=cost)

    def close(self, sequence_ids: Sequence[int]) -> None:
        closed: defaultdict[DraftConnection, list[int]] = defaultdict(list)
        for sequence_id in sequence_ids:
            sequence = self._sequences.pop(sequence_id, None)
            if sequence is None:
                continue
            sequence.finish_measuring()
            if (connection := sequence.connection) is not None and connection.is_ready:
                closed[connection].append(sequence_id)
        for connection, ids in closed.items():
            for start in range(0, len(ids), MAX_BATCH):
                connection.send(Close(connection.epoch, ids[start : start + MAX_BATCH]), self._clock.now())
        if self._fallback is not None:
            self._fallback.close(sequence_ids)

    def shut_down(self) -> None:
        """Send `Goodbye` and close the connections."""
        for connection in self.connections:
            if connection.is_ready:
                connection.transport.send(Goodbye("target stops"))
            connection.close()

    def status(self) -> PoolStatus:
        """Figures of the last step. Any thread may call it."""
        assigned = [sequence.connection for sequence in list(self._sequences.values())]
        return PoolStatus(
            drafters=tuple(connection.status(assigned.count(connection)) for connection in self.connections),
            symptoms=self._arms.current.statistics.symptoms(self._clock.now()),
            steps=self._steps,
            wait_seconds=self._wait_seconds,
            undrafted=self._undrafted,
        )

    def _shape(self, sequence: PoolSequence, max_depth: int) -> tuple[int, int]:
        """(tokens of the chain, alternatives) to request for the nodes of its next draft."""
        longest = min(_as_chain(sequence.progress).depth, max_depth)
        if not self.traits.is_tree or sequence.needs_distribution or sequence.connection is None:
            return longest, 0
        return self._arms.of(sequence.connection).split.split(sequence.progress.depth, longest)

    def _is_available(self) -> bool:
        """Whether a draft worker is connected."""
        return any(connection.is_ready for connection in self.connections)

    def _label(self, sequence_id: int) -> str:
        """End of its traffic class: what is learned of a draft on trial is kept apart."""
        sequence = self._sequences.get(sequence_id)
        return self._arms.label(sequence_id, None if sequence is None else sequence.connection, self.connections)

    def _draft_of(self, sequence: PoolSequence) -> DraftConnection | None:
        """Connection to a worker of the draft that the goodput of a sequence counts for, whether or not it drafts now."""
        if not sequence.progress.allows_drafts:
            return None
        return sequence.connection or self._arms.connection_for(sequence.progress.sequence_id, self.connections)

    def _draft_batch(self, chains: dict[int, DraftChain]) -> DraftBatch:
        """The nodes of every chain in the order that its draft has learned."""
        current, tried = self._arms.current.split, self._arms.candidate.split
        on_trial = {i: chain for i, chain in chains.items() if self._is_on_trial(i)}
        if not on_trial:
            return to_draft_batch(chains, current)
        others = {i: chain for i, chain in chains.items() if i not in on_trial}
        return merge_batches([to_draft_batch(others, current), to_draft_batch(on_trial, tried)])

    def _is_on_trial(self, sequence_id: int) -> bool:
        connection = self._sequences[sequence_id].connection
        return connection is not None and connection.where.is_on_trial

    def _assign(self, sequence: PoolSequence, now: float) -> DraftConnection | None:
        """Open the sequence at the best worker, if any is usable. Workers on trial get a share of the sequences."""
        views = [(connection.where.is_on_trial, connection.view(now)) for connection in self.connections]
        name = None
        for is_trial in self._arms.preferences(sequence.progress.sequence_id):
            arm = self._arms.candidate if is_trial else self._arms.current
            name = name or arm.pairing.choose([view for on_trial, view in views if on_trial is is_trial], now)
        if name is None:
            return None
        connection = self._connections[name]
        connection.send(sequence.open_at(connection), now)
        return sequence.connection  # None if sending failed

    def _unassign(self, connection: DraftConnection, sequence_ids: Iterable[int] | None = None) -> None:
        """These sequences, or all, are not open there any more. Their next draft request opens them again."""
        for sequence_id in list(self._sequences) if sequence_ids is None else sequence_ids:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None and sequence.connection is connection:
                sequence.unassign()

    def _wait(self, requested: list[PoolSequence], deadline: float) -> None:
        """Wait until every draft has arrived, or the missing ones are not worth the wait."""
        while True:
            now = self._clock.now()
            missing = [sequence for sequence in requested if sequence.chain is None and sequence.requested]
            until = self._wait_until(len(requested) - len(missing), missing, now, deadline)
            waiting = {one.connection.transport for one in missing if one.connection is not None}
            if until <= now:  # not for the drafts, but now and then to measure round trips
                waiting = {one.transport for one in self.connections if requested and one.needs_awaited_ping(now)}
            if now >= deadline or not waiting:
                break
            wait_any(list(waiting), (until if until > now else deadline) - now)
            self._receive(was_awaited=True)

    def _wait_until(self, num_ready: int, missing: list[PoolSequence], now: float, deadline: float) -> float:
        """Time until which to wait for the missing drafts; not after `now`: they are not worth the wait."""
        expected = [at for sequence in missing if (at := sequence.expected_at(now, deadline)) > now]
        if not expected:
            return now
        soonest = min(expected)
        num_soonest = sum(at <= soonest + 0.001 for at in expected)
        gains = [self._arms.of(one.connection).statistics.gain for one in missing if one.connection is not None]
        gain, step = sum(gains) / len(gains), self._arms.current.statistics.step_seconds
        if step is None or is_worth_waiting(num_ready, num_soonest, gain, soonest - now, step):
            return min(soonest, deadline)
        return now

    def _maintain(self) -> float:
        """Receive messages and maintain the connections; returns the time."""
        now = self._receive()
        for connection in self.connections:
            connection.maintain(now)
        return now

    def _receive(self, was_awaited: bool = False) -> float:
        """Handle all messages that have arrived; returns the time. `was_awaited`: the caller has waited for them."""
        now = self._clock.now()
        for connection in self.connections:
            while (message := connection.receive(now, was_awaited)) is not None:
                self._handle(connection, message, now, was_awaited)
        return now

    def _handle(self, connection: DraftConnection, message: FromDraft, now: float, was_awaited: bool) -> None:
        if isinstance(message, Drafts):
            for draft in message.drafts:
                sequence = self._sequences.get(draft.sequence)
                if sequence is not None and sequence.connection is connection:
                    sequence.receive_draft(draft, now, was_awaited)
                else:
                    connection.counters.late += 1
        elif isinstance(message, Branches):
            for record in message.sequences if message.epoch == connection.epoch else ():
                sequence = self._sequences.get(record.sequence)
                if sequence is not None and sequence.connection is connection:
                    sequence.receive_branches(record)
        elif isinstance(message, Busy):
            connection.mark_busy(now + message.retry_ms * 1e-3)
            self._unassign(connection, message.sequences)
        elif isinstance(message, Goodbye):
            connection.lose(now, "it is stopping")
        elif isinstance(message, Error):
            if message.code in (ErrorCode.NO_HELLO, ErrorCode.EPOCH):
                connection.repeat_hello(now)
            elif message.code in (ErrorCode.VERSION, ErrorCode.TOKENIZER):
                connection.refuse(now, message.message)
            else:
                self._unassign(connection, message.sequences)

    def _draft_with_fallback(
        self, chains: dict[int, DraftChain], unassigned: list[PoolSequence], deadline: float
    ) -> None:
        """Add to `chains` the fallback's drafts for the `unassigned` sequences."""
        if self._fallback is None or not unassigned:
            return
        ids = [sequence.progress.sequence_id for sequence in unassigned if sequence.progress.depth > 0]
        for sequence_id, draft in self._fallback.collect(ids, deadline).split().items():
            if draft.is_chain and draft.probs is None:
                chains.setdefault(sequence_id, DraftChain(draft.tokens, ()))


def _as_chain(progress: Progress) -> Progress:
    """Its depth as that of a chain, which ends before the last token of the request."""
    levels = progress.max_levels
    return progress if levels is None or progress.depth <= levels else replace(progress, depth=levels)


def _is_same(wanted: DraftAddress | None, known: DraftAddress) -> bool:
    return wanted is not None and replace(wanted, is_on_trial=known.is_on_trial) == known
