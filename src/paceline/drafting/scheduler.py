"""Sequences of all targets at a draft worker: admission, and the branches of the next pass.

`DraftPassTimes` has the recent times of the worker's passes.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from paceline.drafting.branches import BranchKey
from paceline.drafting.state import DraftBackend, DraftBranch, DraftedSequence, VerifyOutcome
from paceline.policy.depth.acceptance import Acceptance
from paceline.policy.pairing.ahead import AheadRound, BranchBudget, DraftingAhead, TargetTokenRate
from paceline.policy.pairing.outcomes import AlternativeOdds, Outcome, ScoreGapAcceptance, likely_outcomes
from paceline.speculation.proposers.model import SequenceParams
from paceline.wire.draft_messages import ErrorCode, Load, Open, RoundRequest
from paceline.wire.transport import Peer


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Limits of a draft worker. Beyond them it answers `Busy`."""

    max_sequences: int = 256
    max_tokens: int = 1 << 20
    """Tokens of all sequences together, which is the capacity of the backend's cache."""
    max_batch: int = 64
    """Branches of one pass."""
    max_branch_tokens: int = 64
    """Most tokens drafted ahead per sequence and round, fewer if there is no time for them. 0 turns drafting ahead off."""
    max_peers: int = 256
    silence: float = 30.0
    """Seconds without a message after which a target is dropped."""


@dataclass(slots=True, eq=False)
class TargetSession:
    """State of one connected target."""

    name: str
    last_message: float
    wants_branches: bool = False
    """Whether the target requests drafts before it asks for them."""
    ahead: DraftingAhead = field(default_factory=DraftingAhead)
    is_ahead: bool = True
    """Whether its next round is drafted ahead."""
    answered_at: float | None = None
    """Time of the last answer. None if there was no answer yet."""
    rate: TargetTokenRate = field(default_factory=TargetTokenRate)
    sequences: dict[int, DraftedSequence] = field(default_factory=dict)

    @property
    def is_waiting(self) -> bool:
        """Whether a round has no answer yet."""
        return any(not state.is_answered for state in self.sequences.values())


class DraftScheduler:
    """Used by one thread, the worker's."""

    def __init__(self, backend: DraftBackend, vocab_size: int, limits: DraftLimits) -> None:
        self.targets: dict[Peer, TargetSession] = {}
        self.acceptance = Acceptance[str](max_depth=16)
        self.budget = BranchBudget()
        self.num_rounds = self.num_ready = 0
        self.num_urgent = 0
        """Branches of the last pass that a target waited for."""
        self._backend, self._vocab_size, self._limits = backend, vocab_size, limits
        self._odds, self._gap_odds = AlternativeOdds(), ScoreGapAcceptance()
        self._ids = itertools.count()
        self._num_tokens = 0
        self._num_passes = 0
        self._outcomes: list[VerifyOutcome] = []
        """Outcomes to learn from when the next pass is scheduled, after the targets have their answers."""
        self._averages: tuple[Sequence[float], Sequence[float]] | None = None
        """Acceptance by position and odds of the alternatives in this pass. None until they are computed."""

    def has_room(self, message: Open) -> bool:
        limits = self._limits
        num_sequences = sum(len(target.sequences) for target in self.targets.values())
        return num_sequences < limits.max_sequences and self._num_tokens + len(message.ids) <= limits.max_tokens

    def open(self, target: TargetSession, message: Open) -> str | None:
        """Open a sequence. Returns what is wrong with the message, if anything."""
        if not message.ids or not self._is_in_vocabulary(message.ids):
            return "ids are empty, or outside the vocabulary"
        if not 0 < message.num_prompt <= len(message.ids):
            return f"num_prompt is {message.num_prompt}, and there are {len(message.ids)} ids"
        if not self._is_in_vocabulary(bias := message.sampling.logit_bias) or min(bias, default=0) < 0:
            return "logit_bias is outside the vocabulary"
        params = SequenceParams(
            message.sampling, message.seed, message.choice, message.num_prompt, message.rule, message.salt
        )
        branch = DraftBranch(next(self._ids), params, list(message.ids), len(message.ids))
        target.sequences[message.sequence] = DraftedSequence(branch, self._backend, self._ids.__next__)
        self._num_tokens += len(message.ids)
        return None

    def start_round(self, target: TargetSession, request: RoundRequest) -> ErrorCode | None:
        """Commit the tokens of `request` and start its round. Returns what is wrong with it, if anything."""
        state = target.sequences.get(request.sequence)
        if state is None:
            return ErrorCode.UNKNOWN_SEQUENCE
        if request.round <= state.round:
            return None  # stale: the target has sent a later round
        if request.base != state.length or request.num_kept > state.num_offered:
            return ErrorCode.LENGTH
        if not self._is_in_vocabulary(request.tokens):
            return ErrorCode.MALFORMED
        tokens = [*state.offered_tokens[: request.num_kept], *request.tokens] if request.num_kept else request.tokens
        outcome = state.advance(request.round, tokens, request.depth, request.num_alternatives)
        if outcome is not None:
            self._outcomes.append(outcome)
        self._num_tokens += len(tokens)
        self._cut(target, state)
        state.was_ready = state.was_ready or state.is_due
        if request.depth:
            self.num_rounds += 1
            self.num_ready += state.was_ready
        if state.was_ready and request.num_held >= request.depth and not request.num_alternatives:
            state.mark_answered()
        return None

    def cut(self, target: TargetSession) -> None:
        """End the drafts of rounds that the target waits for where one more token is not worth the time."""
        for state in target.sequences.values():
            if not state.is_answered:
                self._cut(target, state)

    def _cut(self, target: TargetSession, state: DraftedSequence) -> None:
        gaps = state.draft_gaps
        if not gaps or len(gaps) >= state.depth or not self.budget.is_known:
            return
        alphas, _ = self._estimates(len(gaps) + 1, gaps)
        if not target.rate.is_worth_waiting(math.prod(alphas), self.budget.pass_seconds(len(target.sequences))):
            state.cut()

    def decide_ahead(self, target: TargetSession, requests: Iterable[RoundRequest], delay: float) -> None:
        """Decide whether the next round of `target` is drafted ahead. `delay` is the number of passes that `requests` waited
        for a pass begun ahead."""
        if not self._limits.max_branch_tokens:
            return
        if target.is_ahead:
            found = [
                # The target does not wait for drafts that it already has
                (request.depth, state.num_ready, state.was_ready, 0.0 if request.num_held >= request.depth else delay)
                for request in requests
                if request.depth and (state := target.sequences.get(request.sequence)) is not None
                if state.round == request.round and state.num_ready is not None
            ]
            if found:
                target.ahead.observe(AheadRound(*(sum(column) / len(found) for column in zip(*found, strict=True))))
        target.is_ahead = target.ahead.next_round()

    def close(self, target: TargetSession, sequences: Iterable[int]) -> None:
        for sequence in sequences:
            state = target.sequences.pop(sequence, None)
            if state is not None:
                self._num_tokens -= state.length
                self._backend.close(state.branches)

    def drop(self, peer: Peer) -> None:
        """Forget a target and close its sequences."""
        target = self.targets.pop(peer, None)
        if target is not None:
            self.close(target, list(target.sequences))

    def schedule(self) -> list[DraftBranch]:
        """Branches of the next pass, round-robin over targets. The branches that targets wait for come first, then those
        drafted ahead."""
        self._learn()
        targets = list(self.targets.values())
        self._num_passes += 1
        self._averages = None
        if targets:  # each pass starts with another target
            shift = self._num_passes % len(targets)
            targets = targets[shift:] + targets[:shift]
        branches = list(itertools.islice(_round_robin(map(self._urgent, targets)), self._limits.max_batch))
        self.num_urgent = len(branches)
        if self._limits.max_branch_tokens:
            states = [state for target in targets if target.is_ahead for state in target.sequences.values()]
            ahead = _round_robin(state.branches_ahead(self.plan) for state in states)
            for branch in itertools.islice(ahead, self._limits.max_batch - len(branches)):
                branch.is_ranked = True
                branches.append(branch)
        return branches

    def _urgent(self, target: TargetSession) -> list[DraftBranch]:
        """The branches that the target waits for. Without drafting ahead no outcomes are prepared from them."""
        is_ahead = target.is_ahead and self._limits.max_branch_tokens > 0
        branches = []
        for state in target.sequences.values():
            if (branch := state.urgent_branch) is not None:
                branch.is_ranked = is_ahead or state.num_alternatives > 0
                branches.append(branch)
        return branches

    def free_blocks(self, idle: Iterable[DraftBranch]) -> None:
        """Drop what is drafted ahead if one of the `idle` branches, which got no token, is urgent: it may lack a block."""
        idle_ids = {branch.id for branch in idle}
        if any((branch := state.urgent_branch) is not None and branch.id in idle_ids for state in self._states):
            for state in self._states:
                state.drop_ahead()

    def sequences_of(self, target: TargetSession, branches: Iterable[DraftBranch]) -> list[int]:
        """Sequences of a target that any of `branches` belongs to."""
        ids = {branch.id for branch in branches}
        return [
            sequence for sequence, state in target.sequences.items() if ids & {branch.id for branch in state.branches}
        ]

    def load(self, pass_seconds: float, target: TargetSession | None = None) -> Load:
        """Load of the worker, as reported to `target`."""
        states = self._states
        waiting = sum(not state.is_answered for state in states)
        share = None if target is None else target.ahead.paused_share
        return Load(len(states), waiting, int(pass_seconds * 1e6), None if share is None else round(100 * share))

    def plan(self, num_offered: int, depth: int, continues: bool, gaps: Sequence[float | None]) -> list[Outcome]:
        """Outcomes of a round to prepare. `gaps` are the score gaps of the drafted tokens, as far as they are computed."""
        if not depth:
            return []
        sequences = sum(len(target.sequences) for target in self.targets.values() if target.is_ahead)
        alphas, odds = self._estimates(num_offered + 1, gaps)
        outcomes = likely_outcomes(alphas, odds, num_offered, depth, self._limits.max_branch_tokens, continues)
        own = math.prod(alphas) if continues else 0.0
        probabilities = [own, *[outcome.probability for outcome in outcomes]]
        return outcomes[: self.budget.num_branches(depth, max(1, sequences), probabilities) - 1]

    def alternatives(self, state: DraftedSequence) -> list[BranchKey]:
        """The alternatives that the target verifies in the same step as the draft of this round, which are its most probable
        outcomes."""
        if not state.num_alternatives or not state.num_offered:
            return []
        alphas, odds = self._estimates(state.num_offered, state.gaps)
        return state.keys(likely_outcomes(alphas, odds, state.num_offered - 1, 1, state.num_alternatives + 1))

    def _estimates(self, num_positions: int, gaps: Sequence[float | None]) -> tuple[list[float], Sequence[float]]:
        """Acceptance of the drafted tokens at `num_positions` positions, and odds of the alternatives."""
        if self._averages is None:
            self._averages = self.acceptance.alphas(""), self._odds.odds
        averages, odds = self._averages
        alphas = [averages[min(i, len(averages) - 1)] for i in range(num_positions)]
        alphas[: len(gaps)] = map(self._gap_odds.alpha, alphas, gaps)
        return alphas, odds

    @property
    def _states(self) -> list[DraftedSequence]:
        return [state for target in list(self.targets.values()) for state in list(target.sequences.values())]

    def _learn(self) -> None:
        for outcome in self._outcomes:
            self.acceptance.observe("", outcome.known, outcome.accepted)
            self._gap_odds.observe(outcome.gaps, outcome.accepted)
            if outcome.was_wrong:
                self._odds.observe(outcome.alternative)
        self._outcomes.clear()

    def _is_in_vocabulary(self, tokens: Iterable[int]) -> bool:
        return max(tokens, default=0) < self._vocab_size


def _round_robin(groups: Iterable[Iterable[DraftBranch]]) -> Iterator[DraftBranch]:
    """The first branch of every group, then the second of each, and so on."""
    remaining = [iter(group) for group in groups]
    while remaining:
        unfinished = []
        for group in remaining:
            branch = next(group, None)
            if branch is not None:
                yield branch
                unfinished.append(group)
        remaining = unfinished


class DraftPassTimes:
    """Moving averages over about ten passes, in seconds. They are 0 until they are known."""

    def __init__(self) -> None:
        self.average = 0.0
        self._urgent = 0.0
        """Time of a pass that a target waits for."""
        self._ahead = 0.0
        """Time of the last pass if all of it was ahead. The messages received next may have waited for its end."""

    @property
    def ahead_delay(self) -> float:
        """The number of urgent passes by which the last pass ahead delayed the messages received next."""
        # A message arrived at any moment of the pass ahead: on average it waited for half of it
        return 0.5 * self._ahead / self._urgent if self._urgent else 0.0

    def start_iteration(self) -> None:
        """The messages that waited for the last pass are handled."""
        self._ahead = 0.0

    def observe(self, seconds: float, is_urgent: bool) -> None:
        """A pass took `seconds`. `is_urgent` says that a target waited for some of its branches."""
        self.average = _moving_average(self.average, seconds)
        if is_urgent:
            self._urgent = _moving_average(self._urgent, seconds)
        else:
            self._ahead = seconds


def _moving_average(average: float, value: float) -> float:
    return average + 0.1 * (value - average) if average else value
