"""One sequence as the pool proposer sees it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.runtime.draft_pool.connection import DraftLink
from paceline.runtime.draft_pool.drafts import Chain
from paceline.runtime.draft_worker import distributions as laws
from paceline.runtime.draft_worker.distributions import Law
from paceline.runtime.draft_worker.packed_branches import unpack
from paceline.runtime.wire.codec import Malformed
from paceline.runtime.wire.messages import Ahead, Branch, Drafted, Open, Rule, Sampling, Step
from paceline.speculation.proposer import Progress

HOPE = 1.2
"""A draft that is expected so much later than the deadline allows may still come in time."""


@dataclass(slots=True, eq=False)
class PoolRider:
    """Where it is open, what the worker there knows of it, and what came back."""

    progress: Progress
    vocab_size: int
    link: DraftLink | None = None
    known: int = 0
    """Tokens that the worker has been told of."""
    round: int = 0
    asked: int = 0
    """Depth of the round under way; 0: nothing was asked for, or it is settled."""
    asked_at: float = 0.0
    chain: Chain | None = None
    offered: tuple[int, ...] = ()
    is_answered: bool = False
    """The draft is the worker's answer to this very round: it has those tokens, and need not be sent them again."""
    branches: dict[tuple[int, int], Branch] = field(default_factory=dict)
    """Drafts for outcomes of the round under way, or the word that they are being made."""
    outcome: tuple[int, int] | None = None
    """(accepted, token that followed) of the round before."""
    is_missed: bool = False
    """The worker was not prepared for that outcome: it has to draft afresh."""

    @property
    def wants_law(self) -> bool:
        return self.progress.verification == "rejection" and not self.progress.sampling.is_greedy

    def open_at(self, link: DraftLink) -> Open:
        """Start afresh there: all that the worker needs to know."""
        self.link = link
        self.branches.clear()
        self.offered, self.known, self.round, self.is_answered = (), len(self.progress.ids), 0, False
        return opening(self.progress, link.epoch)

    def leave(self) -> None:
        """Open nowhere any more."""
        self.link, self.asked = None, 0

    def ask(self, depth: int, now: float) -> Step:
        """The next round: what was committed since the last, and the draft for it if that was sent ahead."""
        link = self.link
        assert link is not None
        ids, base = self.progress.ids, self.known
        tokens = list(ids[base:])
        self.known = base + len(tokens)
        accepted = len(tokens) - 1
        is_outcome = accepted >= 0 and tuple(tokens[:accepted]) == self.offered[:accepted]
        self.outcome = (accepted, tokens[-1]) if is_outcome else None
        branch = None if self.outcome is None else self.branches.get(self.outcome)
        # What follows after all was accepted is always being drafted, and nobody is told which tokens
        is_open = bool(self.offered) and accepted == len(self.offered)
        self.is_missed = branch is None and bool(self.branches) and not is_open
        kept = accepted if self.outcome is not None and self.is_answered and link.version >= 3 else 0
        self.branches.clear()
        self.offered, self.is_answered = (), False
        self.round += 1
        self.asked, self.asked_at = depth, now
        held = 0
        if branch is not None:
            self._use(branch, link)
        link.counts.rounds += 1
        if self.chain is not None:
            link.counts.ready += 1
            held = len(self.chain.tokens)
        return Step(self.progress.sequence_id, self.round, base, tokens[kept:], depth, held, kept)

    def take(self, drafted: Drafted, now: float, watched: bool) -> None:
        """The answer to a round. What is wrong with it counts against the worker."""
        link = self.link
        assert link is not None
        if drafted.round == self.round:
            for key in zip(drafted.begun[::2], drafted.begun[1::2], strict=False):
                self.branches.setdefault(key, Branch(*key, []))
        if drafted.round != self.round or not self.asked:
            self._take_late(drafted, link)
            return
        if self.chain is not None:
            return
        try:
            if len(drafted.tokens) > self.asked:
                raise Malformed(f"{len(drafted.tokens)} tokens, and {self.asked} were asked for")
            self.chain = self._chain(drafted.tokens, drafted.laws)
            self.is_answered = True
        except Malformed as malformed:
            self.asked = 0
            link.fault(f"answered {malformed}")
            return
        link.good()
        if drafted.ready:
            link.counts.ready += 1
            link.timed(now - self.asked_at, now, watched)

    def take_ahead(self, ahead: Ahead) -> None:
        """Kept as they are: only the one that comes true is looked at, be it a moment late."""
        link, is_late = self.link, ahead.round == self.round - 1 and self.asked and self.chain is None
        assert link is not None
        if ahead.round != self.round and not is_late:
            return
        try:
            branches = unpack(ahead)
        except Malformed as malformed:
            link.fault(f"sent ahead {malformed}")
            return
        for branch in branches:
            if not is_late:
                self.branches[branch.accepted, branch.token] = branch
            elif (branch.accepted, branch.token) == self.outcome:
                self._use(branch, link)

    def due(self, now: float, deadline: float) -> float:
        """When its draft can be expected: after a round trip if it was prepared, and else when it is drafted afresh. What is
        overdue may come any moment; what is due past the deadline is not waited for."""
        link = self.link
        assert link is not None
        if link.is_silent(now):
            return -math.inf
        trip, load = link.round_trip.seconds, link.load
        if trip is None or not load.pass_us:
            return deadline
        prepared = self.asked_at + 1.25 * trip + 0.002
        if not self.is_missed and now < prepared:
            return prepared
        # From what the worker says of itself: how late an answer was seen here tells how late somebody looked
        fresh = trip + (self.asked + 0.5) * load.pass_us * 1e-6
        if fresh > HOPE * (deadline - self.asked_at):
            return -math.inf
        return max(self.asked_at + fresh, now + 0.1 * fresh)

    def _take_late(self, drafted: Drafted, link: DraftLink) -> None:
        """Its round went on without it. If its first token turns out to be what was chosen, the rest is the next draft."""
        link.counts.late += 1
        if drafted.round == self.round and not self.offered and not self.wants_law and len(drafted.tokens) > 1:
            first, *rest = drafted.tokens
            self.branches[0, first] = Branch(0, first, rest)

    def _use(self, branch: Branch, link: DraftLink) -> None:
        """The draft for the outcome that came true, if it is there and long enough: a late answer is one token short."""
        if len(branch.tokens) < max(1, self.asked - 1):
            return
        try:
            self.chain = self._chain(branch.tokens[: self.asked], branch.laws, whole=branch.tokens)
        except Malformed as malformed:
            link.fault(f"sent ahead {malformed}")

    def _chain(self, tokens: Sequence[int], data: bytes, whole: Sequence[int] | None = None) -> Chain:
        """`Malformed` unless it is a draft that this sequence can be verified with."""
        if max(tokens, default=0) >= self.vocab_size:
            raise Malformed("a token outside the vocabulary")
        known: list[Law] = []
        if self.wants_law:
            known = laws.decode(data, tokens if whole is None else whole, self.vocab_size)[: len(tokens)]
        return Chain(tuple(tokens), tuple(known))


def opening(progress: Progress, epoch: int) -> Open:
    """All that a draft worker needs to know of a sequence."""
    s = progress.sampling
    return Open(
        epoch=epoch,
        sequence=progress.sequence_id,
        ids=list(progress.ids),
        num_prompt=progress.num_prompt,
        sampling=Sampling(
            s.temperature,
            s.top_k,
            s.top_p,
            s.min_p,
            s.repetition_penalty,
            s.presence_penalty,
            s.frequency_penalty,
            dict(s.logit_bias),
        ),
        seed=progress.seed,
        choice=progress.choice,
        rule=Rule.REJECTION if progress.verification == "rejection" else Rule.COUPLED,
        salt=progress.cache_salt,
    )
