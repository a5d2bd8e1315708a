"""The proposer `pool`: drafts come from draft workers over the network. A failure there costs speed, never correctness.

`PoolInbox` receives the messages of draft workers on the engine's thread and passes them to the connection or the sequence they
are for. `DraftWait` makes a pass of the target wait as long as the missing drafts are worth it. `FallbackDrafts` is a local
proposer for sequences that are open at no draft worker.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.core.clock import Clock, WallClock
from paceline.core.status import DrafterStatus, Symptom
from paceline.core.traffic import TrafficClass
from paceline.drafting.connection import DraftAddress, DraftConnection, DraftConnections
from paceline.drafting.drafts import DraftChain, as_chain, to_draft_batch
from paceline.drafting.sequence import PoolSequence, PoolSequences
from paceline.drafting.trial import PoolDrafts, TrialChange
from paceline.model_files.tokenizer import Fingerprint
from paceline.policy.pairing.pairing import is_worth_waiting
from paceline.speculation import Proposer, ProposerTraits, SequenceProgress
from paceline.speculation.drafts import DraftBatch, DraftCost, merge_batches
from paceline.wire.draft_messages import (
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
from paceline.wire.transport import Connection, wait_any


class PoolInbox:
    """Receives from all connections. Only `wait` blocks."""

    def __init__(self, connections: DraftConnections, sequences: PoolSequences, clock: Clock) -> None:
        self._connections, self._sequences, self._clock = connections, sequences, clock

    def receive(self, was_awaited: bool = False) -> float:
        """Handle all messages that have arrived and return the time. `was_awaited` says that the caller has waited for them."""
        now = self._clock.now()
        for connection in self._connections.all:
            while (message := connection.receive(now, was_awaited)) is not None:
                self._handle(connection, message, now, was_awaited)
        return now

    def maintain(self) -> float:
        """Receive messages, maintain the connections and return the time."""
        now = self.receive()
        for connection in self._connections.all:
            connection.maintain(now)
        return now

    def wait(self, transports: Iterable[Connection[FromDraft]], seconds: float) -> None:
        """Wait until one of them has a message, at most `seconds`, and handle what has arrived."""
        wait_any(list(transports), seconds)
        self.receive(was_awaited=True)

    def _handle(self, connection: DraftConnection, message: FromDraft, now: float, was_awaited: bool) -> None:
        if isinstance(message, Drafts):
            for draft in message.drafts:
                if (sequence := self._sequences.open_at(connection, draft.sequence)) is not None:
                    sequence.receive_draft(draft, now, was_awaited)
                else:
                    connection.counters.late += 1
        elif isinstance(message, Branches):
            for record in message.sequences if message.epoch == connection.epoch else ():
                if (sequence := self._sequences.open_at(connection, record.sequence)) is not None:
                    sequence.receive_branches(record)
        elif isinstance(message, Busy):
            connection.mark_busy(now + message.retry_ms * 1e-3)
            self._sequences.unassign(connection, message.sequences)
        elif isinstance(message, Goodbye):
            connection.lose(now, "it is stopping")
        elif isinstance(message, Error):
            self._handle_error(connection, message, now)

    def _handle_error(self, connection: DraftConnection, error: Error, now: float) -> None:
        if error.code in (ErrorCode.NO_HELLO, ErrorCode.EPOCH):
            connection.repeat_hello(now)
        elif error.code in (ErrorCode.VERSION, ErrorCode.TOKENIZER):
            connection.refuse(now, error.message)
        else:
            self._sequences.unassign(connection, error.sequences)


IDLE_WAIT_SECONDS = 0.01
"""Time that an idle target waits for the answer to a ping, about every two seconds."""


class DraftWait:
    """Waits for drafts, and now and then for the answer to a ping, so that the measured round trip is exact."""

    def __init__(self, inbox: PoolInbox, connections: DraftConnections, pool_drafts: PoolDrafts, clock: Clock) -> None:
        self._inbox, self._connections, self._pool_drafts, self._clock = inbox, connections, pool_drafts, clock

    def wait(self, requested: list[PoolSequence], deadline: float) -> None:
        """Wait until every draft has arrived, or the missing ones are not worth the wait."""
        while True:
            now = self._clock.now()
            missing = [sequence for sequence in requested if sequence.chain is None and sequence.requested]
            until = self._wait_until(len(requested) - len(missing), missing, now, deadline)
            waiting = {sequence.connection.transport for sequence in missing if sequence.connection is not None}
            if until <= now:  # not for the drafts, but now and then to measure round trips
                waiting = set(self._awaited_pings(now) if requested else ())
            if now >= deadline or not waiting:
                break
            self._inbox.wait(waiting, (until if until > now else deadline) - now)

    def wait_idle(self, now: float) -> None:
        """Wait a moment for pings whose answer should be waited for."""
        awaited = self._awaited_pings(now)
        if awaited:
            self._inbox.wait(awaited, IDLE_WAIT_SECONDS)

    def _awaited_pings(self, now: float) -> list[Connection[FromDraft]]:
        """Transports of the connections whose answer to a ping should be waited for."""
        return [connection.transport for connection in self._connections.all if connection.needs_awaited_ping(now)]

    def _wait_until(self, num_ready: int, missing: list[PoolSequence], now: float, deadline: float) -> float:
        """Time until which to wait for the missing drafts. It is not after `now` if they are not worth the wait."""
        expected = [at for sequence in missing if (at := sequence.expected_at(now, deadline)) > now]
        if not expected:
            return now
        soonest = min(expected)
        num_soonest = sum(at <= soonest + 0.001 for at in expected)
        gains = [
            self._pool_drafts.of(sequence.connection).statistics.gain
            for sequence in missing
            if sequence.connection is not None
        ]
        gain, step = sum(gains) / len(gains), self._pool_drafts.current.statistics.step_seconds
        if step is None or is_worth_waiting(num_ready, num_soonest, gain, soonest - now, step):
            return min(soonest, deadline)
        return now


class FallbackDrafts:
    """Drafts chains without distributions. Without a proposer there are none."""

    def __init__(self, proposer: Proposer | None) -> None:
        self._proposer = proposer

    def observe(self, batch: Iterable[SequenceProgress]) -> None:
        """Report the progress of sequences that are open nowhere."""
        if self._proposer is not None:
            self._proposer.observe([as_chain(progress) for progress in batch])

    def collect(self, batch: Sequence[SequenceProgress], deadline: float) -> dict[int, DraftChain]:
        """Drafts by sequence id, for sequences that are open nowhere."""
        if self._proposer is None or not batch:
            return {}
        ids = [progress.sequence_id for progress in batch if progress.depth > 0]
        drafts = self._proposer.collect(ids, deadline).split()
        return {
            i: DraftChain(draft.tokens, ()) for i, draft in drafts.items() if draft.is_chain and draft.probs is None
        }

    def close(self, sequence_ids: Sequence[int]) -> None:
        if self._proposer is not None:
            self._proposer.close(sequence_ids)


@dataclass(frozen=True, slots=True)
class PoolStatus:
    drafters: tuple[DrafterStatus, ...]
    symptoms: tuple[Symptom, ...]
    steps: int
    wait_seconds: float
    undrafted: int
    """Rounds whose draft did not arrive in time."""


class PoolProposer:
    """Opens every sequence at the draft worker that answers soonest, and at another worker after a loss.

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
        """`workers` are the draft workers known now, until `set_workers` replaces them. `tokenizer` is that of the target,
        which drafts must share. `verifies_trees` makes workers send alternatives to the tokens of their chains, which are
        verified in the same step as the chain."""
        self._clock = clock or WallClock()
        self._pool_drafts = PoolDrafts()
        self._sequences = PoolSequences(vocab_size)
        self._connections = DraftConnections(tokenizer, name, self._sequences.unassign)
        self._inbox = PoolInbox(self._connections, self._sequences, self._clock)
        self._wait = DraftWait(self._inbox, self._connections, self._pool_drafts, self._clock)
        self._fallback = FallbackDrafts(fallback)
        self._steps = self._undrafted = 0
        self._wait_seconds = 0.0
        self._step_started, self._step_waited = 0.0, 0.0
        """Time of the last `observe`, and the time that the step waited for drafts since."""
        self.traits = ProposerTraits(
            is_tree=verifies_trees,
            can_miss_steps=True,
            is_remote=True,
            traffic_class=self._traffic_class,
            is_available=lambda: self._connections.has_ready,
        )
        self.set_workers(workers)

    @property
    def connections(self) -> tuple[DraftConnection, ...]:
        return self._connections.all

    def set_workers(self, workers: Iterable[DraftAddress]) -> TrialChange:
        """Use exactly these workers. Connections to workers that stay are kept."""
        workers = tuple(workers)
        if not self._connections.are_to(workers):
            self._sequences.finish_measuring()
        self._connections.set_workers(workers)
        change = self._pool_drafts.set_connections(self.connections)
        self.maintain()
        return change

    def maintain(self) -> None:
        """Keep the connections alive while the engine is idle, and measure round trips now and then."""
        self._wait.wait_idle(self._inbox.maintain())

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        """Commit the new tokens at the draft workers and request the next drafts."""
        now = self._inbox.maintain()
        step_seconds = max(0.0, now - self._step_started - self._step_waited)
        self._step_started, self._step_waited = now, 0.0
        for connection, rounds in self._start_rounds(batch, step_seconds, now).items():
            send_ahead = self._pool_drafts.of(connection).statistics.wants_branches(connection)
            for start in range(0, len(rounds), MAX_BATCH):
                connection.send(Advance(connection.epoch, rounds[start : start + MAX_BATCH], send_ahead), now)
        if batch:  # also for plain steps: a symptom stays visible while the circuit breaker is open
            self._pool_drafts.check(self.connections, now)
        self._fallback.observe(
            progress for progress in batch if self._sequences.connection_of(progress.sequence_id) is None
        )

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        """The drafts that arrive in time, or those of the fallback."""
        started = self._inbox.receive()
        if deadline > started:
            self._pool_drafts.observe_step(deadline - started)
        sequences = [sequence for i in sequence_ids if (sequence := self._sequences.get(i)) is not None]
        requested = [sequence for sequence in sequences if sequence.requested]
        missing = [sequence.connection for sequence in requested if sequence.chain is None]
        trip = max((connection.trip_seconds for connection in missing if connection is not None), default=0.0)
        self._wait.wait(requested, deadline)
        waited = self._count_wait(requested, started)
        chains = self._take_chains(sequences, started)
        unassigned = [sequence.progress for sequence in sequences if sequence.connection is None]
        for sequence_id, chain in self._fallback.collect(unassigned, deadline).items():
            chains.setdefault(sequence_id, chain)
        cost = DraftCost(network_seconds=min(trip, waited))  # the wait for the round trip, without drafting
        return replace(self._draft_batch(chains), cost=cost)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for connection, ids in self._sequences.remove(sequence_ids).items():
            for start in range(0, len(ids), MAX_BATCH):
                connection.send(Close(connection.epoch, ids[start : start + MAX_BATCH]), self._clock.now())
        self._fallback.close(sequence_ids)

    def shut_down(self) -> None:
        """Send `Goodbye` and close the connections."""
        self._connections.close()

    def status(self) -> PoolStatus:
        """Figures of the last step. Any thread may call it."""
        assigned = self._sequences.connections()
        return PoolStatus(
            drafters=tuple(connection.status(assigned.count(connection)) for connection in self.connections),
            symptoms=self._pool_drafts.current.statistics.symptoms(self._clock.now()),
            steps=self._steps,
            wait_seconds=self._wait_seconds,
            undrafted=self._undrafted,
        )

    def _start_rounds(
        self, batch: Sequence[SequenceProgress], step_seconds: float, now: float
    ) -> Mapping[DraftConnection, list[RoundRequest]]:
        """End the last round of every sequence, and return the requests of the next rounds. The step took `step_seconds`,
        without the wait for drafts."""
        requests: defaultdict[DraftConnection, list[RoundRequest]] = defaultdict(list)
        max_depths: dict[DraftConnection, int] = {}
        for progress in batch:
            sequence = self._sequences.update(progress)
            sequence.measure_round(step_seconds, self._draft_of(sequence))
            sequence.requested, sequence.chain = 0, None
            if progress.depth == 0:
                sequence.offered = ()
            elif (connection := sequence.connection or self._assign(sequence, now)) is not None:
                self._learn(sequence, connection)
                if connection not in max_depths:
                    max_depths[connection] = self._pool_drafts.of(connection).statistics.max_depth(connection)
                depth, num_alternatives = self._shape(sequence, max_depths[connection])
                requests[connection].append(sequence.start_round(depth, now, num_alternatives))
        return requests

    def _assign(self, sequence: PoolSequence, now: float) -> DraftConnection | None:
        """Open the sequence at the best worker, if any is usable. Workers on trial get a share of the sequences."""
        views = [(connection.where.is_on_trial, connection.view(now)) for connection in self.connections]
        name = None
        for is_trial in self._pool_drafts.preferences(sequence.progress.sequence_id):
            pool_draft = self._pool_drafts.candidate if is_trial else self._pool_drafts.current
            name = name or pool_draft.pairing.choose([view for on_trial, view in views if on_trial is is_trial], now)
        if name is None:
            return None
        connection = self._connections[name]
        connection.send(sequence.open_at(connection), now)
        return sequence.connection  # None if sending failed

    def _learn(self, sequence: PoolSequence, connection: DraftConnection) -> None:
        """Observe the outcome of the draft that was verified, if there was one."""
        if sequence.offered and (committed := sequence.committed):
            pool_draft = self._pool_drafts.of(connection)
            pool_draft.statistics.observe_round(len(sequence.offered), len(committed) - 1)
            if self.traits.is_tree:
                pool_draft.split.observe(sequence.offered, sequence.offered_alternatives, committed)

    def _shape(self, sequence: PoolSequence, max_depth: int) -> tuple[int, int]:
        """(tokens of the chain, alternatives) to request for the nodes of its next draft."""
        longest = min(as_chain(sequence.progress).depth, max_depth)
        if not self.traits.is_tree or sequence.needs_distribution or sequence.connection is None:
            return longest, 0
        return self._pool_drafts.of(sequence.connection).split.split(sequence.progress.depth, longest)

    def _count_wait(self, requested: Iterable[PoolSequence], started: float) -> float:
        """Count the wait for the drafts of this step, which began at `started`. Returns its seconds."""
        waited = self._clock.now() - started
        self._steps += 1
        self._wait_seconds += waited
        self._step_waited = waited
        for sequence in requested:
            arrived = sequence.received_at if sequence.chain is not None else started + waited
            sequence.measured.wait = max(0.0, arrived - started)
        return waited

    def _take_chains(self, sequences: Iterable[PoolSequence], now: float) -> dict[int, DraftChain]:
        """The drafts that have arrived, by sequence id. The target verifies them now."""
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
                    sequence.connection.check_alive(now)
        return chains

    def _draft_batch(self, chains: dict[int, DraftChain]) -> DraftBatch:
        """The nodes of every chain in the order that its draft has learned."""
        current, tried = self._pool_drafts.current.split, self._pool_drafts.candidate.split
        on_trial = {i: chain for i, chain in chains.items() if self._is_on_trial(i)}
        if not on_trial:
            return to_draft_batch(chains, current)
        others = {i: chain for i, chain in chains.items() if i not in on_trial}
        return merge_batches([to_draft_batch(others, current), to_draft_batch(on_trial, tried)])

    def _is_on_trial(self, sequence_id: int) -> bool:
        connection = self._sequences.connection_of(sequence_id)
        return connection is not None and connection.where.is_on_trial

    def _draft_of(self, sequence: PoolSequence) -> DraftConnection | None:
        """Connection to a worker of the draft that the goodput of a sequence counts for, whether or not it drafts now."""
        if not sequence.progress.allows_drafts:
            return None
        return sequence.connection or self._pool_drafts.connection_for(sequence.progress.sequence_id, self.connections)

    def _traffic_class(self, traffic: TrafficClass, sequence_id: int) -> TrafficClass:
        """The class of a sequence. What is learned of a draft on trial is kept apart."""
        opened = self._sequences.connection_of(sequence_id)
        is_on_trial = self._pool_drafts.is_on_trial(sequence_id, opened, self.connections)
        return traffic._replace(on_trial=True) if is_on_trial else traffic
