"""The proposer `pool`: drafts come from draft workers across a network. Everything that can go wrong there costs speed only."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from paceline.cluster.pairing.pairing import Pairing
from paceline.cluster.pairing.patience import is_worth_waiting
from paceline.core.clock import Clock, WallClock
from paceline.runtime.draft_pool.connection import DraftAddress, DraftLink
from paceline.runtime.draft_pool.drafts import Chain, batch_of
from paceline.runtime.draft_pool.sequence import PoolRider
from paceline.runtime.draft_pool.snapshot import LinkSnapshot, PoolSnapshot
from paceline.runtime.draft_pool.vitals import PoolVitals
from paceline.runtime.wire.messages import (
    MAX_BATCH,
    Advance,
    Branches,
    Busy,
    Close,
    Drafts,
    Error,
    Fault,
    FromDraft,
    Goodbye,
    Step,
)
from paceline.runtime.wire.transport import wait_any
from paceline.speculation.drafts import DraftBatch
from paceline.speculation.proposer import Progress, Proposer

IDLE_LOOK = 0.01
"""Seconds that an idle target waits for the answer to a ping, every two seconds or so."""


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
        """`workers`: those known so far; `set_workers` says who there is later."""
        self._vocabulary, self._vocab_size, self._name = vocabulary, vocab_size, name
        self._fallback, self._clock = fallback, clock or WallClock()
        self._links: dict[str, DraftLink] = {}
        self._riders: dict[int, PoolRider] = {}
        self._pairing = Pairing()
        self._vitals = PoolVitals()
        self._steps = self._waited_steps = self._undrafted = 0
        self._wait_seconds = 0.0
        self.network_seconds = 0.0
        """Of the last `collect`: what it waited for the round trip, drafting left out."""
        self.set_workers(workers)

    def set_workers(self, workers: Iterable[DraftAddress]) -> None:
        """Use these and no others; lines to those that stay are kept."""
        wanted = {where.name: where for where in workers}
        kept = {name: link for name, link in self._links.items() if wanted.get(name) == link.where}
        for name, link in self._links.items():
            if name not in kept:
                self._unassign(link)
                if link.is_up:
                    link.line.send(Goodbye("no longer in the cluster"))
                link.close()
        for name, where in wanted.items():
            if name not in kept:
                kept[name] = DraftLink(where, self._vocabulary, self._name, self._unassign)
        self._links = kept
        self.tend()

    def tend(self) -> None:
        """Keep the lines alive while nobody generates, and now and then see how far away the workers are."""
        now = self._tend()
        unwatched = [link.line for link in self._links.values() if link.is_unwatched(now)]
        if unwatched:
            wait_any(unwatched, IDLE_LOOK)
            self._hear(watched=True)

    def observe(self, batch: Sequence[Progress]) -> None:
        now = self._tend()
        steps: defaultdict[DraftLink, list[Step]] = defaultdict(list)
        caps: dict[DraftLink, int] = {}
        for progress in batch:
            rider = self._riders.get(progress.sequence_id)
            if rider is None:
                rider = self._riders[progress.sequence_id] = PoolRider(progress, self._vocab_size)
            rider.progress = progress
            rider.asked, rider.chain = 0, None
            if progress.depth == 0:
                rider.offered = ()
            elif (link := rider.link or self._assign(rider, now)) is not None:
                if rider.offered and (committed := len(progress.ids) - rider.known):
                    self._vitals.verified(len(rider.offered), committed - 1)
                if link not in caps:
                    caps[link] = self._vitals.depth_cap(link)
                steps[link].append(rider.ask(min(progress.depth, caps[link]), now))
        for link, asked in steps.items():
            ahead = self._vitals.wants_ahead(link)
            for start in range(0, len(asked), MAX_BATCH):
                link.send(Advance(link.epoch, asked[start : start + MAX_BATCH], ahead), now)
        if batch:  # of plain steps too: while the breaker is open, whatever opened it stays seen
            self._vitals.look(self._links.values(), now)
        if self._fallback is not None:
            self._fallback.observe([p for p in batch if self._riders[p.sequence_id].link is None])

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        started = self._hear()
        if deadline > started:
            self._vitals.timed(deadline - started)
        riders = [rider for i in sequence_ids if (rider := self._riders.get(i)) is not None]
        asked = [rider for rider in riders if rider.asked]
        trip = max((rider.link.trip for rider in asked if rider.chain is None and rider.link is not None), default=0.0)
        self._wait(asked, deadline)
        waited = self._clock.now() - started
        self._steps += 1
        self._wait_seconds += waited
        self.network_seconds = min(trip, waited)
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
        for link in self._links.values():
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
                    link.round_trip.seen,
                    view.queue,
                    at.count(link),
                    link.counts,
                    link.load.pass_us * 1e-6,
                    None if link.load.resting is None else link.load.resting / 100,
                )
                for link in self._links.values()
                for view in (link.view(now),)
            ),
            symptoms=self._vitals.symptoms(now),
            waited_steps=self._waited_steps,
            steps=self._steps,
            wait_seconds=self._wait_seconds,
            undrafted=self._undrafted,
        )

    def _assign(self, rider: PoolRider, now: float) -> DraftLink | None:
        """Open the sequence wherever is best, if there is anywhere."""
        name = self._pairing.choose([link.view(now) for link in self._links.values()], now)
        if name is None:
            return None
        link = self._links[name]
        link.send(rider.open_at(link), now)
        return rider.link  # none, if the worker was lost in sending

    def _unassign(self, link: DraftLink, sequences: Iterable[int] | None = None) -> None:
        """Open there no more: they are opened again, wherever is best, when they next want a draft."""
        for sequence_id in list(self._riders) if sequences is None else sequences:
            rider = self._riders.get(sequence_id)
            if rider is not None and rider.link is link:
                rider.leave()

    def _wait(self, asked: list[PoolRider], deadline: float) -> None:
        """Until every draft is there, or the rest is not worth it."""
        waited = False
        while True:
            now = self._clock.now()
            missing = [rider for rider in asked if rider.chain is None and rider.asked]
            until = self._patience(len(asked) - len(missing), missing, now, deadline)
            lines = {rider.link.line for rider in missing if rider.link is not None}
            if until <= now:  # of no use for the drafts, but once in a while for knowing how far away they are
                lines = {link.line for link in self._links.values() if asked and link.is_unwatched(now)}
            if now >= deadline or not lines:
                break
            waited = True
            wait_any(list(lines), (until if until > now else deadline) - now)
            self._hear(watched=True)
        self._waited_steps += waited

    def _patience(self, ready: int, missing: list[PoolRider], now: float, deadline: float) -> float:
        """When to look again; not after `now`: waiting for those that are missing is not worth it."""
        due = [at for rider in missing if (at := rider.due(now, deadline)) > now]
        if not due:
            return now
        soonest = min(due)
        together = sum(at <= soonest + 0.001 for at in due)
        step = self._vitals.step
        if step is None or is_worth_waiting(ready, together, self._vitals.gain, soonest - now, step):
            return min(soonest, deadline)
        return now

    def _tend(self) -> float:
        """Hear what has come and see to the lines; returns the time."""
        now = self._hear()
        for link in self._links.values():
            link.tend(now)
        return now

    def _hear(self, watched: bool = False) -> float:
        """Take in all that has come; returns the time. `watched`: it was waited for."""
        now = self._clock.now()
        for link in self._links.values():
            while (message := link.receive(now, watched)) is not None:
                self._take(link, message, now, watched)
        return now

    def _take(self, link: DraftLink, message: FromDraft, now: float, watched: bool) -> None:
        if isinstance(message, Drafts):
            for drafted in message.drafts:
                rider = self._riders.get(drafted.sequence)
                if rider is not None and rider.link is link:
                    rider.take(drafted, now, watched)
                else:
                    link.counts.late += 1
        elif isinstance(message, Branches):
            for ahead in message.sequences if message.epoch == link.epoch else ():
                rider = self._riders.get(ahead.sequence)
                if rider is not None and rider.link is link:
                    rider.take_ahead(ahead)
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

    def _with_fallback(self, chains: dict[int, Chain], homeless: list[PoolRider], deadline: float) -> DraftBatch:
        if self._fallback is not None and homeless:
            wanting = [rider.progress.sequence_id for rider in homeless if rider.progress.depth > 0]
            for sequence_id, draft in self._fallback.collect(wanting, deadline).split().items():
                if draft.is_chain and draft.probs is None:
                    chains.setdefault(sequence_id, Chain(draft.tokens, ()))
        return batch_of(chains)
