"""The proposer `pool`: drafts come from draft workers across a network. Everything that can go wrong there costs speed only."""

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from paceline.cluster.pairing import Pairing
from paceline.cluster.patience import is_worth_waiting
from paceline.cluster.symptoms import SymptomWatch, Vitals
from paceline.core.clock import Clock, WallClock
from paceline.runtime import laws
from paceline.runtime.codec import Malformed
from paceline.runtime.draft_link import DraftAddress, DraftLink
from paceline.runtime.laws import Law
from paceline.runtime.messages import (
    MAX_BATCH,
    MAX_DEPTH,
    Advance,
    Ahead,
    Branch,
    Branches,
    Busy,
    Close,
    Drafted,
    Drafts,
    Error,
    Fault,
    FromDraft,
    Goodbye,
    Step,
)
from paceline.runtime.pool_rider import PoolRider, opening
from paceline.runtime.pool_snapshot import LinkSnapshot, PoolSnapshot
from paceline.runtime.pooled_drafts import Chain, batch_of
from paceline.runtime.transport import wait_any
from paceline.speculation.drafts import DraftBatch
from paceline.speculation.proposer import Progress, Proposer

logger = logging.getLogger(__name__)

AHEAD_SHARE = 0.05
"""Where a round trip is longer than this share of a step, drafts are asked to be sent before the verdict is known."""
HOPE = 1.2
"""A draft that is expected so much later than the deadline allows may still come in time."""
SLOWEST = 16.0
"""Recent figures follow new ones by one part in this many."""


class _Average:
    """Follows a figure that changes."""

    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, value: float) -> None:
        self.value = value if self.value is None else self.value + (value - self.value) / SLOWEST


class PoolProposer:
    """Opens sequences at the draft worker that answers soonest, and elsewhere when it is lost. `fallback` drafts meanwhile.

    One thread, the engine's, calls everything but `snapshot`.
    """

    def __init__(
        self,
        workers: Iterable[DraftAddress],
        vocabulary: str,
        vocab_size: int,
        name: str = "",
        fallback: Proposer | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._vocab_size, self._fallback, self._clock = vocab_size, fallback, clock or WallClock()
        self._links = [DraftLink(where, vocabulary, name, self._unassign) for where in workers]
        self._by_name = {link.where.name: link for link in self._links}
        self._riders: dict[int, PoolRider] = {}
        self._pairing = Pairing()
        self._watch = SymptomWatch()
        self._step, self._gain, self._depth = _Average(), _Average(), _Average()
        self._steps = self._waited_steps = self._undrafted = 0
        self._wait_seconds = 0.0
        for link in self._links:
            link.tend(self._clock.now())

    def observe(self, batch: Sequence[Progress]) -> None:
        now = self._hear()
        for link in self._links:
            link.tend(now)
        steps: defaultdict[DraftLink, list[Step]] = defaultdict(list)
        for progress in batch:
            rider = self._riders.setdefault(progress.sequence_id, PoolRider(progress))
            rider.progress = progress
            rider.asked, rider.chain = 0, None
            if progress.depth == 0:
                rider.offered = ()
            elif self._assign(rider, now):
                assert rider.link is not None
                steps[rider.link].append(self._ask(rider, now))
        for link, asked in steps.items():
            ahead = self._wants_ahead(link)
            for start in range(0, len(asked), MAX_BATCH):
                link.send(Advance(link.epoch, asked[start : start + MAX_BATCH], ahead), now)
        if self._fallback is not None:
            self._fallback.observe([p for p in batch if self._riders[p.sequence_id].link is None])

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        started = self._hear()
        if deadline > started:
            self._step.observe(deadline - started)
        riders = [rider for i in sequence_ids if (rider := self._riders.get(i)) is not None]
        self._wait([rider for rider in riders if rider.asked], deadline)
        waited = self._clock.now() - started
        self._steps += 1
        self._wait_seconds += waited
        chains: dict[int, Chain] = {}
        for rider in riders:
            if rider.chain is not None and rider.chain.tokens:
                chains[rider.progress.sequence_id] = rider.chain
                rider.offered = rider.chain.tokens
                rider.asked, rider.chain = 0, None
            elif rider.asked:
                self._undrafted += 1
                rider.asked = 0
                if rider.link is not None:
                    rider.link.suspect(started)
        self._look()
        return self._with_fallback(chains, [r for r in riders if r.link is None], deadline)

    def close(self, sequence_ids: Sequence[int]) -> None:
        closed: defaultdict[DraftLink, list[int]] = defaultdict(list)
        for sequence_id in sequence_ids:
            rider = self._riders.pop(sequence_id, None)
            if rider is not None and rider.link is not None and rider.link.is_up:
                closed[rider.link].append(sequence_id)
        for link, numbers in closed.items():
            for start in range(0, len(numbers), MAX_BATCH):
                link.send(Close(link.epoch, numbers[start : start + MAX_BATCH]), self._clock.now())
        if self._fallback is not None:
            self._fallback.close(sequence_ids)

    def shut_down(self) -> None:
        """Say goodbye and close the lines."""
        for link in self._links:
            if link.is_up:
                link.line.send(Goodbye("target stops"))
            link.close()

    def snapshot(self) -> PoolSnapshot:
        """Safe from any thread: figures as of the last step."""
        now = self._clock.now()
        at = [rider.link for rider in list(self._riders.values())]
        return PoolSnapshot(
            links=tuple(
                LinkSnapshot(
                    view.name,
                    link.where.address,
                    link.state,
                    link.epoch,
                    view.round_trip,
                    view.queue,
                    at.count(link),
                    link.counts,
                )
                for link in self._links
                for view in (link.view(now),)
            ),
            symptoms=self._watch.active,
            waited_steps=self._waited_steps,
            steps=self._steps,
            wait_seconds=self._wait_seconds,
            undrafted=self._undrafted,
        )

    def _assign(self, rider: PoolRider, now: float) -> bool:
        """See to it that the sequence is open somewhere."""
        if rider.link is not None:
            return True
        name = self._pairing.choose([link.view(now) for link in self._links], now)
        if name is None:
            return False
        progress, link = rider.progress, self._by_name[name]
        rider.branches.clear()
        rider.offered, rider.known, rider.round = (), len(progress.ids), 0
        link.send(opening(progress, link.epoch), now)
        if not link.is_up:  # lost in sending
            return False
        rider.link = link
        return True

    def _ask(self, rider: PoolRider, now: float) -> Step:
        progress, link = rider.progress, rider.link
        assert link is not None
        tokens = list(progress.ids[rider.known :])
        base, rider.known = rider.known, len(progress.ids)
        depth = min(progress.depth, MAX_DEPTH, self._depth_cap(link))
        if rider.offered and tokens:
            self._gain.observe(len(tokens) - 1)
            self._depth.observe(len(rider.offered))
        accepted = len(tokens) - 1
        is_outcome = accepted >= 0 and tuple(tokens[:accepted]) == rider.offered[:accepted]
        rider.outcome = (accepted, tokens[-1]) if is_outcome else None
        branch = rider.branches.get(rider.outcome) if rider.outcome is not None else None
        rider.is_missed = branch is None and bool(rider.branches)
        rider.branches.clear()
        rider.offered = ()
        rider.round += 1
        rider.asked, rider.asked_at = depth, now
        if branch is not None:
            self._use(rider, link, branch)
        link.counts.rounds += 1
        if rider.chain is not None:
            link.counts.ready += 1
        return Step(
            progress.sequence_id, rider.round, base, tokens, depth, len(rider.chain.tokens) if rider.chain else 0
        )

    def _use(self, rider: PoolRider, link: DraftLink, branch: Branch) -> None:
        """The draft for the outcome that came true, if it is there and long enough: a late answer is one token short."""
        if len(branch.tokens) < max(1, rider.asked - 1):
            return
        try:
            rider.chain = self._chain(rider, branch.tokens[: rider.asked], branch.laws, whole=branch.tokens)
        except Malformed as malformed:
            link.fault(f"sent ahead {malformed}")

    def _chain(self, rider: PoolRider, tokens: Sequence[int], data: bytes, whole: Sequence[int] | None = None) -> Chain:
        """`Malformed` unless it is a draft that this sequence can be verified with."""
        if max(tokens, default=0) >= self._vocab_size:
            raise Malformed("a token outside the vocabulary")
        known: list[Law] = []
        if rider.wants_law:
            known = laws.decode(data, tokens if whole is None else whole, self._vocab_size)[: len(tokens)]
        return Chain(tuple(tokens), tuple(known))

    def _wait(self, asked: list[PoolRider], deadline: float) -> None:
        """Until every draft is there, or the rest is not worth it."""
        waited = False
        while True:
            now = self._clock.now()
            missing = [rider for rider in asked if rider.chain is None and rider.asked]
            until = self._patience(len(asked) - len(missing), missing, now, deadline)
            lines = {rider.link.line for rider in missing if rider.link is not None}
            if until <= now:  # of no use for the drafts, but once in a while for knowing how far away they are
                lines = {link.line for link in self._links if asked and link.is_unwatched(now)}
            if now >= deadline or not lines:
                break
            waited = True
            wait_any(list(lines), (until if until > now else deadline) - now)
            self._hear(watched=True)
        self._waited_steps += waited

    def _patience(self, ready: int, missing: list[PoolRider], now: float, deadline: float) -> float:
        """When to look again; not after `now`: waiting for those that are missing is not worth it."""
        due = [at for rider in missing if (at := self._due(rider, now, deadline)) > now]
        if not due:
            return now
        soonest = min(due)
        together = sum(at <= soonest + 0.001 for at in due)
        step = self._step.value
        if step is None or is_worth_waiting(ready, together, self._gain.value or 1.0, soonest - now, step):
            return min(soonest, deadline)
        return now

    def _due(self, rider: PoolRider, now: float, deadline: float) -> float:
        """When its draft can be expected: after a round trip if it was prepared, and else when it is drafted afresh. What is
        overdue may come any moment; what is due past the deadline is not waited for."""
        assert rider.link is not None
        if rider.link.is_silent(now):
            return -math.inf
        trip, load = rider.link.round_trip.seconds, rider.link.load
        if trip is None or not load.pass_us:
            return deadline
        prepared = rider.asked_at + 1.25 * trip + 0.002
        if not rider.is_missed and now < prepared:
            return prepared
        # From what the worker says of itself: how late an answer was seen here tells how late somebody looked
        fresh = trip + (rider.asked + 0.5) * load.pass_us * 1e-6
        if fresh > HOPE * (deadline - rider.asked_at):
            return -math.inf
        return max(rider.asked_at + fresh, now + 0.1 * fresh)

    def _hear(self, watched: bool = False) -> float:
        """Take in all that has come; returns the time. `watched`: it was waited for."""
        now = self._clock.now()
        for link in self._links:
            while (message := link.receive(now, watched)) is not None:
                self._take(link, message, now, watched)
        return now

    def _take(self, link: DraftLink, message: FromDraft, now: float, watched: bool) -> None:
        if isinstance(message, Drafts):
            self._take_drafts(link, message, now, watched)
        elif isinstance(message, Branches):
            for ahead in message.sequences if message.epoch == link.epoch else ():
                self._take_ahead(link, ahead)
        elif isinstance(message, Busy):
            link.busy(now + message.retry_ms * 1e-3)
            self._unassign(link, message.sequences)
        elif isinstance(message, Goodbye):
            link.lose(now, "it is leaving")
        elif isinstance(message, Error):
            if message.code in (Fault.STRANGER, Fault.EPOCH):
                link.greet_again(now)
            elif message.code in (Fault.VERSION, Fault.VOCABULARY):
                link.refused(now, message.code, message.message)
            else:
                self._unassign(link, message.sequences)

    def _take_drafts(self, link: DraftLink, message: Drafts, now: float, watched: bool) -> None:
        for drafted in message.drafts:
            rider = self._riders.get(drafted.sequence)
            if rider is None or rider.link is not link:
                link.counts.late += 1
                continue
            if drafted.round != rider.round or not rider.asked:
                self._take_late(rider, link, drafted)
                continue
            if rider.chain is not None:
                continue
            try:
                if len(drafted.tokens) > rider.asked:
                    raise Malformed(f"{len(drafted.tokens)} tokens, and {rider.asked} were asked for")
                rider.chain = self._chain(rider, drafted.tokens, drafted.laws)
            except Malformed as malformed:
                rider.asked = 0
                link.fault(f"answered {malformed}")
                continue
            link.good()
            link.counts.ready += drafted.ready
            if drafted.ready:
                link.timed(now - rider.asked_at, now, watched)

    def _take_late(self, rider: PoolRider, link: DraftLink, drafted: Drafted) -> None:
        """Its round went on without it. If its first token turns out to be what was chosen, the rest is the next draft."""
        link.counts.late += 1
        if drafted.round == rider.round and not rider.offered and not rider.wants_law and len(drafted.tokens) > 1:
            first, *rest = drafted.tokens
            rider.branches[0, first] = Branch(0, first, rest)

    def _take_ahead(self, link: DraftLink, ahead: Ahead) -> None:
        """Kept as they are: only the one that comes true is looked at, be it a moment late."""
        rider = self._riders.get(ahead.sequence)
        if rider is None or rider.link is not link:
            return
        if ahead.round == rider.round:
            rider.branches.update(((branch.accepted, branch.token), branch) for branch in ahead.branches)
        elif ahead.round == rider.round - 1 and rider.asked and rider.chain is None:
            for branch in ahead.branches:
                if (branch.accepted, branch.token) == rider.outcome:
                    self._use(rider, link, branch)

    def _unassign(self, link: DraftLink, sequences: Iterable[int] | None = None) -> None:
        """Open there no more: they are opened again, wherever is best, when they next want a draft."""
        for sequence_id in list(self._riders) if sequences is None else sequences:
            rider = self._riders.get(sequence_id)
            if rider is not None and rider.link is link:
                rider.link, rider.asked = None, 0

    def _wants_ahead(self, link: DraftLink) -> bool:
        trip, step = link.round_trip.seconds, self._step.value
        return link.version >= 2 and trip is not None and step is not None and trip > AHEAD_SHARE * step

    def _depth_cap(self, link: DraftLink) -> int:
        """A draft slower than the verification is asked for less: as many tokens as it drafts in that time."""
        if not self._watch.has("slow_draft") or not link.load.pass_us or self._step.value is None:
            return MAX_DEPTH
        return max(1, int(self._step.value / (link.load.pass_us * 1e-6)))

    def _look(self) -> None:
        passes = [link.load.pass_us * 1e-6 for link in self._links if link.is_up and link.load.pass_us]
        trips = [link.round_trip.seconds for link in self._links if link.is_up and link.round_trip.seconds is not None]
        depth = self._depth.value
        vitals = Vitals(
            accepted=self._gain.value,
            depth=depth,
            draft_seconds=min(passes) * depth if passes and depth else None,
            verify_seconds=self._step.value,
            round_trip=min(trips, default=None),
        )
        for symptom in self._watch.observe(vitals):
            logger.warning("%s", symptom)

    def _with_fallback(self, chains: dict[int, Chain], homeless: list[PoolRider], deadline: float) -> DraftBatch:
        if self._fallback is not None and homeless:
            wanting = [rider.progress.sequence_id for rider in homeless if rider.progress.depth > 0]
            for sequence_id, draft in self._fallback.collect(wanting, deadline).split().items():
                if draft.is_chain and draft.probs is None:
                    chains.setdefault(sequence_id, Chain(draft.tokens, ()))
        return batch_of(chains)
