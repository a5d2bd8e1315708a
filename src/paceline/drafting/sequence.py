"""The sequences of the proposer `pool`: the draft workers where they are open, and the drafts received for them."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from paceline.drafting import branches as distributions
from paceline.drafting.branches import BranchKey, unpack
from paceline.drafting.connection import DraftConnection
from paceline.drafting.drafts import DraftChain, validated_alternatives
from paceline.speculation import SequenceProgress
from paceline.wire.codec import MalformedMessage
from paceline.wire.draft_messages import Open, RoundDraft, RoundRequest, SequenceBranches

MAX_MEASURED_ROUNDS = 64
"""Rounds that count as one sequence for the goodput of a draft; a longer sequence counts again. A short sequence counts as
well, because a good draft needs few rounds."""
MAX_LATENESS = 1.2
"""Expected time of a draft, as a multiple of the time to the deadline, up to which the draft is waited for."""


@dataclass(slots=True, eq=False)
class MeasuredRounds:
    """Rounds of one sequence with one draft worker, for its goodput."""

    count: int = 0
    tokens: int = 0
    seconds: float = 0.0
    length: int = 0
    """Committed tokens at the end of the last round."""
    connection: DraftConnection | None = None
    """Connection to a worker of the draft that they count for."""
    wait: float = 0.0
    """Time that this step waited for the draft of this sequence."""


@dataclass(slots=True, eq=False)
class PoolSequence:
    progress: SequenceProgress
    vocab_size: int
    connection: DraftConnection | None = None
    """Connection to the draft worker where the sequence is open. None if it is open nowhere."""
    num_sent: int = 0
    """Tokens that the worker has."""
    round: int = 0
    requested: int = 0
    """Depth of the current round. 0 if no draft was requested, or if the draft was used."""
    requested_at: float = 0.0
    chain: DraftChain | None = None
    """Draft of the current round."""
    offered: tuple[int, ...] = ()
    """Chain that is being verified."""
    offered_alternatives: tuple[BranchKey, ...] = ()
    """Alternatives that are verified in the same step."""
    num_alternatives: int = 0
    """Alternatives requested in the current round."""
    is_answered: bool = False
    """Whether the draft is the worker's answer to this round: the worker has its tokens."""
    branches: dict[BranchKey, list[int]] = field(default_factory=dict)
    """Drafts for outcomes of the current round. The draft of an outcome is empty while the worker computes it."""
    outcome: BranchKey | None = None
    """Outcome of the last round."""
    is_unprepared: bool = False
    """Whether the worker has no branch for that outcome and drafts on demand."""
    received_at: float = 0.0
    """Time at which the draft of the current round arrived."""
    measured: MeasuredRounds = field(default_factory=MeasuredRounds)

    @property
    def needs_distribution(self) -> bool:
        """Whether verification needs the distribution `q` of every drafted token."""
        return self.progress.verification == "rejection" and not self.progress.sampling.is_greedy

    def open_at(self, connection: DraftConnection) -> Open:
        """Assign the sequence to a worker. Returns the message that opens it there."""
        self.connection = connection
        self.branches.clear()
        self.offered, self.num_sent, self.round, self.is_answered = (), len(self.progress.ids), 0, False
        return open_message(self.progress, connection.epoch)

    def unassign(self) -> None:
        """The sequence is open nowhere any more."""
        self.finish_measuring()
        self.connection, self.requested = None, 0

    def measure_round(self, step_seconds: float, connection: DraftConnection | None) -> None:
        """The step that ends now took `step_seconds`, without the wait for drafts. Counts for `connection`, also if the step
        was without a draft. The first call begins to count."""
        rounds = self.measured
        committed = len(self.progress.ids) - rounds.length if rounds.length else 0
        rounds.length = len(self.progress.ids)
        if rounds.connection is None or connection is None or not _is_same_draft(rounds.connection, connection):
            self.finish_measuring()
            rounds.connection = connection
        if connection is not None and committed > 0:
            rounds.count += 1
            rounds.tokens += committed
            rounds.seconds += step_seconds + rounds.wait
            if rounds.count >= MAX_MEASURED_ROUNDS:
                self.finish_measuring()
        rounds.wait = 0.0

    def finish_measuring(self) -> None:
        """Add the rounds so far to the sums of their worker, as one sequence."""
        rounds, connection = self.measured, self.measured.connection
        if connection is not None and rounds.count:
            connection.goodput = connection.goodput.with_sequence(rounds.tokens, rounds.seconds)
        rounds.connection, rounds.count, rounds.tokens, rounds.seconds = None, 0, 0, 0.0

    @property
    def committed(self) -> Sequence[int]:
        """Tokens committed since the last request."""
        return self.progress.ids[self.num_sent :]

    def start_round(self, depth: int, now: float, num_alternatives: int = 0) -> RoundRequest:
        """Request of the next round. Uses the draft of a branch if the worker sent the right branch ahead."""
        connection = self.connection
        assert connection is not None
        ids, base = self.progress.ids, self.num_sent
        tokens = list(ids[base:])
        self.num_sent = base + len(tokens)
        accepted = len(tokens) - 1
        is_outcome = accepted >= 0 and tuple(tokens[:accepted]) == self.offered[:accepted]
        self.outcome = BranchKey(accepted, tokens[-1]) if is_outcome else None
        branch = None if self.outcome is None else self.branches.get(self.outcome)
        if (
            self.outcome is None
            and BranchKey(accepted - 1, tokens[-2] if accepted > 0 else 0) in self.offered_alternatives
        ):
            branch = self._after_alternative(BranchKey(accepted - 1, tokens[-2]), tokens[-1])
        # The worker always drafts the outcome of a full acceptance, and does not announce it
        is_full_acceptance = bool(self.offered) and accepted == len(self.offered)
        self.is_unprepared = branch is None and bool(self.branches) and not is_full_acceptance
        num_kept = accepted if self.outcome is not None and self.is_answered else 0
        self.branches.clear()
        self.offered, self.offered_alternatives, self.is_answered = (), (), False
        self.round += 1
        self.requested, self.requested_at, self.num_alternatives = depth, now, num_alternatives
        if branch is not None:
            self._use_branch(branch, connection)
        connection.counters.rounds += 1
        num_held = 0
        if self.chain is not None:
            connection.counters.ready += 1
            num_held = len(self.chain.tokens)
        return RoundRequest(
            self.progress.sequence_id, self.round, base, tokens[num_kept:], depth, num_held, num_kept, num_alternatives
        )

    def receive_draft(self, draft: RoundDraft, now: float, was_awaited: bool) -> None:
        """Take the answer to a round. An invalid answer counts as a fault of the worker."""
        connection = self.connection
        assert connection is not None
        if draft.round == self.round:
            for accepted, token in zip(draft.started[::2], draft.started[1::2], strict=False):
                self.branches.setdefault(BranchKey(accepted, token), [])
        if draft.round == self.round and self.offered and self.offered == tuple(draft.tokens):
            return  # its alternatives came too late: the draft of a branch is being verified
        if draft.round != self.round or not self.requested:
            self._receive_late(draft, connection)
            return
        try:
            if len(draft.tokens) > self.requested:
                raise MalformedMessage(f"{len(draft.tokens)} tokens instead of {self.requested}")
            alternatives = validated_alternatives(draft, self.num_alternatives, self.vocab_size)
            if self.chain is not None:  # a branch
                if self.chain.tokens == tuple(draft.tokens):
                    self.chain = self.chain._replace(alternatives=alternatives)
                return
            self.chain = self._validated_chain(draft.tokens, draft.distributions)._replace(alternatives=alternatives)
            self.is_answered, self.received_at = True, now
        except MalformedMessage as error:
            self.requested = 0
            connection.record_fault(f"sent an invalid draft ({error})")
            return
        connection.record_success()
        if draft.was_ready:
            connection.counters.ready += 1
            connection.observe_round_trip(now - self.requested_at, now, was_awaited)

    def receive_branches(self, record: SequenceBranches) -> None:
        """Store branches. A branch of the last round is used at once if it belongs to the actual outcome."""
        connection = self.connection
        assert connection is not None
        is_late = record.round == self.round - 1 and self.requested and self.chain is None
        if record.round != self.round and not is_late:
            return
        try:
            branches = unpack(record)
        except MalformedMessage as error:
            connection.record_fault(f"sent invalid branches ({error})")
            return
        for key, tokens in branches:
            if not is_late:
                self.branches[key] = tokens
            elif key == self.outcome:
                self._use_branch(tokens, connection)

    def expected_at(self, now: float, deadline: float) -> float:
        """Time at which the draft is expected: after a round trip if it was prepared, otherwise after drafting on demand.

        An overdue draft is expected soon. `-inf` means that the draft is not expected before the deadline.
        """
        connection = self.connection
        assert connection is not None
        if connection.is_silent(now):
            return -math.inf
        trip, load = connection.round_trip.seconds, connection.load
        if trip is None or not load.pass_us:
            return deadline
        prepared = self.requested_at + 1.25 * trip + 0.002
        if not self.is_unprepared and now < prepared:
            return prepared
        # The worker's own figure: an answer's arrival time here depends on when this thread looks
        on_demand = trip + (self.requested + 0.5) * load.pass_us * 1e-6
        if on_demand > MAX_LATENESS * (deadline - self.requested_at):
            return -math.inf
        return max(self.requested_at + on_demand, now + 0.1 * on_demand)

    def _after_alternative(self, alternative: BranchKey, token: int) -> list[int] | None:
        """The rest of the branch of an accepted alternative, if it foresaw the token that follows."""
        branch = self.branches.get(alternative)
        return branch[1:] if branch and branch[0] == token else None

    def _receive_late(self, draft: RoundDraft, connection: DraftConnection) -> None:
        """The round was verified without this draft. If its first token is committed, the rest is the next draft."""
        connection.counters.late += 1
        if draft.round == self.round and not self.offered and not self.needs_distribution and len(draft.tokens) > 1:
            first, *rest = draft.tokens
            self.branches[BranchKey(0, first)] = rest

    def _use_branch(self, tokens: list[int], connection: DraftConnection) -> None:
        """Use the draft of the actual outcome if it is long enough; a late answer lacks one token."""
        if len(tokens) < max(1, self.requested - 1):
            return
        try:
            self.chain = self._validated_chain(tokens[: self.requested], b"")
        except MalformedMessage as error:
            connection.record_fault(f"sent an invalid branch ({error})")

    def _validated_chain(self, tokens: Sequence[int], data: bytes) -> DraftChain:
        """Raises `MalformedMessage` if the target cannot verify this draft."""
        if max(tokens, default=0) >= self.vocab_size:
            raise MalformedMessage("a token outside the vocabulary")
        decoded = distributions.decode(data, tokens, self.vocab_size) if self.needs_distribution else []
        return DraftChain(tuple(tokens), tuple(decoded))


def _is_same_draft(first: DraftConnection, second: DraftConnection) -> bool:
    """Whether the two connections lead to workers of the same draft: the draft in use, or the draft on trial."""
    return first.where.is_on_trial is second.where.is_on_trial


def open_message(progress: SequenceProgress, epoch: int) -> Open:
    """All that a draft worker needs to know of a sequence."""
    return Open(
        epoch=epoch,
        sequence=progress.sequence_id,
        ids=list(progress.ids),
        num_prompt=progress.num_prompt,
        # Drafting does not use the parameters that are reset here
        sampling=replace(progress.sampling, stop=(), stop_token_ids=(), json_schema=None, grammar=None, logprobs=None),
        seed=progress.seed,
        choice=progress.choice,
        rule=progress.verification,
        salt=progress.cache_salt,
    )


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
