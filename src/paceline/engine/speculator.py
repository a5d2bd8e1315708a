"""The engine's side of speculation: asks proposers for drafts, learns from rounds, and decides how deep the next one goes."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import groupby
from typing import NamedTuple

from paceline.core.clock import Clock
from paceline.core.sequence import Sequence
from paceline.engine.scheduler import Schedule
from paceline.engine.stats.step_totals import StepTotals
from paceline.engine.stats.traffic_classes import TrafficClasses, traffic_class
from paceline.engine.validator import Intake
from paceline.speculation.depth.breaker import Breaker
from paceline.speculation.depth.drift import Change
from paceline.speculation.depth.policy import Candidate, DepthPolicy, Drafting, RoundObservation, StepObservation
from paceline.speculation.drafts import Draft
from paceline.speculation.proposer import (
    Hidden,
    HiddenRequest,
    Progress,
    Proposer,
    forks,
    hears_when_asked,
    hidden_wanted,
    network_seconds,
)
from paceline.speculation.reading import Reading, take_reading
from paceline.speculation.trees.tree import InvalidDraft, depths, prune, validate
from paceline.speculation.verification.verify import Verdict


class SpeculatedRound(NamedTuple):
    """One sequence's round: the depth asked for, the levels drafted, the tokens accepted; of a tree also how many nodes it
    had and which of them were accepted, in draft order."""

    sequence: Sequence
    asked: int
    drafted: int
    accepted: int
    num_nodes: int | None = None
    path: tuple[int, ...] | None = None

    @property
    def observation(self) -> RoundObservation:
        return RoundObservation(
            self.sequence.id,
            traffic_class(self.sequence),
            self.drafted,
            self.accepted,
            self.asked,
            self.num_nodes,
            self.path,
        )


class Speculator:
    """Proposers by method, one depth policy, one switch, and what is known of the traffic."""

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        depth: DepthPolicy,
        breaker: Breaker,
        intake: Intake,
        clock: Clock,
        vocab_size: int,
        enabled: bool = True,
    ) -> None:
        self.proposers = proposers
        self.depth = depth
        self.enabled = enabled
        self.traffic = TrafficClasses(breaker)
        self.totals = StepTotals()
        self.num_invalid = 0
        """Drafts dropped because they were none: not a tree, or not of this vocabulary."""
        self.timed_ahead: frozenset[str] = frozenset()
        """Methods whose steady rounds run ahead of the host and are timed there: a step on the host, which only starts them
        off or catches a draft up, says nothing about their cost."""
        self._configured = enabled
        self._intake = intake
        self._clock = clock
        self._vocab_size = vocab_size
        self._patience = 0.0
        self._ended: list[int] = []
        """Sequences forgotten since the last step was observed."""
        self._draft_seconds: defaultdict[str, float] = defaultdict(float)
        self._network_seconds = 0.0
        self._reading: defaultdict[str, Reading] = defaultdict(Reading)
        self._idle_since: float | None = None
        self._idle_seconds = 0.0

    def propose(self, plan: Schedule) -> dict[int, Draft]:
        """Whatever the proposers have ready, cut to the room that was reserved for it."""
        room = {item.sequence.id: item.num_draft for item in plan.items if item.num_draft}
        asked: defaultdict[str, list[int]] = defaultdict(list)
        for item in plan.items:
            if item.num_draft:
                asked[item.sequence.method].append(item.sequence.id)
        # Waiting for a draft longer than the target takes to do without it cannot pay.
        deadline = self._clock.now() + self._patience
        drafts: dict[int, Draft] = {}
        for method, ids in asked.items():
            self._take_reading(method)  # of what was lent
            before, started = self._reading[method].seconds, self._clock.now()
            for sequence_id, draft in self.proposers[method].collect(ids, deadline).split().items():
                if sequence_id not in room:
                    continue
                draft = prune(draft, room[sequence_id])
                try:
                    validate(draft, self._vocab_size)
                except InvalidDraft:
                    self.num_invalid += 1
                else:
                    drafts[sequence_id] = draft
            took = self._clock.now() - started
            network = min(took, network_seconds(self.proposers[method]))
            self._network_seconds += network
            self._take_reading(method)
            self._draft_seconds[method] += max(0.0, took - network - (self._reading[method].seconds - before))
        return drafts

    def learn(
        self, plan: Schedule, drafts: Mapping[int, Draft], verdicts: Mapping[int, Verdict], verify_seconds: float
    ) -> None:
        """Tell the depth policy and the breaker what this round brought and what it cost."""
        self._idle_since = None  # a step that was to be taken anyway
        self._patience = verify_seconds
        draft_seconds, self._draft_seconds = self._draft_seconds, defaultdict(float)
        network, self._network_seconds = self._network_seconds, 0.0
        rounds = []
        for item in plan.items:
            if item.num_draft:
                draft, path = drafts.get(item.sequence.id), verdicts[item.sequence.id].path
                levels = max(depths(draft.parents)) if draft else 0
                nodes = len(draft) if draft else 0
                rounds.append(SpeculatedRound(item.sequence, item.num_draft, levels, len(path), nodes, path))
            elif item.sequence.depth and self.enabled:
                self.traffic.had_no_room(traffic_class(item.sequence))
        self._observe(
            rounds,
            batch=len(verdicts),
            rows=len(verdicts) + sum(len(draft) for draft in drafts.values()),
            prefill_rows=plan.num_tokens - len(verdicts),
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
            context=sum(len(item.sequence.ids) for item in plan.items if item.sequence.id in verdicts),
            is_timed=not any(item.sequence.method in self.timed_ahead for item in plan.items),
            network=network,
        )

    def came_home(self) -> None:
        """The device waits for the host, until rounds run ahead again."""
        self._idle_since = self._clock.now()

    def went_ahead(self) -> None:
        if self._idle_since is not None:
            self._idle_seconds, self._idle_since = self._clock.now() - self._idle_since, None

    def record(
        self,
        rounds: Seq[SpeculatedRound],
        batch: int,
        seats: int,
        rows: int,
        draft_seconds: float,
        verify_seconds: float,
        context: int,
        is_timed: bool = True,
    ) -> None:
        """A step of `batch` sequences that decoded on `seats` and have `context` tokens, those in `rounds` with drafts of one
        method. `is_timed`: its seconds are typical, with nothing in them that was done for the first time."""
        seconds = {round_.sequence.method: draft_seconds for round_ in rounds}
        self._observe(rounds, batch, rows, 0, seconds, verify_seconds, context, is_timed, seats=seats)

    def _observe(
        self,
        rounds: Seq[SpeculatedRound],
        batch: int,
        rows: int,
        prefill_rows: int,
        draft_seconds: Mapping[str, float],
        verify_seconds: float,
        context: int,
        is_timed: bool,
        network: float = 0.0,
        seats: int | None = None,
    ) -> None:
        for method in draft_seconds:
            self._take_reading(method)
        reading, self._reading = self._reading, defaultdict(Reading)
        read = sum(read.seconds for read in reading.values())
        idle, self._idle_seconds = max(0.0, self._idle_seconds - read), 0.0
        drafted = sum(draft_seconds.values()) + read
        self.totals.add(prefill_rows, bool(rounds), drafted, network, verify_seconds)
        if not self.enabled:
            self._settle()
            return
        observed = tuple(round_.observation for round_ in rounds)
        self._start_over(self.traffic.observe(observed, self._clock.now(), self.depth.advantage))
        asked: dict[str, int] = {}
        for round_ in rounds:
            method = round_.sequence.method
            asked[method] = max(asked.get(method, 0), round_.asked)
        self.depth.observe(
            StepObservation(
                batch=batch,
                rows=rows,
                prefill_rows=prefill_rows,
                drafting=tuple(
                    Drafting(method, depth, draft_seconds[method], reading[method].tokens, reading[method].seconds)
                    for method, depth in asked.items()
                ),
                verify_seconds=verify_seconds,
                network_seconds=network,
                rounds=observed,
                context=context,
                is_timed=is_timed,
                seats=seats,
                boarding_seconds=idle if rounds else 0.0,
            )
        )
        self._settle()

    def wanted(self, plan: Schedule) -> dict[str, HiddenRequest]:
        """By method: the hidden states to keep of this step, for sequences that may be drafted from them."""
        if not self.enabled:
            return {}
        methods = {item.sequence.method for item in plan.items if item.sequence.speculation.enabled}
        return {method: wants for method in methods if (wants := hidden_wanted(self.proposers[method]))}

    def look_ahead(
        self,
        running: Seq[Sequence],
        verdicts: Mapping[int, Verdict] | None = None,
        hidden: Mapping[int, Hidden] | None = None,
        has_room: bool = True,
    ) -> None:
        """Decide every sequence's next depth and let the proposers know what was committed: the target's picks in the rounds
        just verified and its `hidden` states included. Where the next pass has no room for drafts there is nothing to decide,
        unless somebody drafts meanwhile for the pass after it."""
        if not self.enabled:
            for sequence in running:
                sequence.depth = 0
            return
        verdicts, hidden = verdicts or {}, hidden or {}
        ready = [sequence for sequence in running if sequence.num_uncomputed == 1]
        if has_room or not all(sequence.method in self.timed_ahead for sequence in ready):
            self.decide(ready)
        else:
            self._leave_out(ready)
        progress: defaultdict[str, list[Progress]] = defaultdict(list)
        is_deaf = {method: hears_when_asked(proposer) for method, proposer in self.proposers.items()}
        for sequence in ready:
            if sequence.depth == 0 and is_deaf[sequence.method]:
                continue
            verdict = verdicts.get(sequence.id)
            picks = verdict.picks if verdict else ()
            progress[sequence.method].append(self._progress(sequence, hidden.get(sequence.id), picks))
        for sequence in running:
            if sequence.num_uncomputed > 1 and sequence.id in hidden:
                progress[sequence.method].append(self._progress(sequence, hidden[sequence.id]))
        for method, batch in progress.items():
            started = self._clock.now()
            self.proposers[method].observe(batch)
            self._draft_seconds[method] += self._clock.now() - started

    def hand_over(self, sequence: Sequence, states: Seq[Hidden]) -> None:
        """Hidden states of its prompt that were computed elsewhere, as if they had been computed here."""
        wants = hidden_wanted(self.proposers[sequence.method])
        if wants is None or wants.last or not (self.enabled and sequence.speculation.enabled):
            return
        for hidden in states:
            if set(wants.layers) <= set(hidden.inner):
                self.proposers[sequence.method].observe([self._progress(sequence, hidden)])

    def decide(self, ready: Seq[Sequence]) -> None:
        """Set the depth of sequences that are about to decode."""
        if not self.enabled or self.depth.rests(len(ready)):
            for sequence in ready:
                sequence.depth = 0
            if self.enabled:
                self.traffic.declined([traffic_class(sequence) for sequence in ready if sequence.speculation.enabled])
            return
        wanted = [self._max_depth(sequence) for sequence in ready]
        candidates = self._candidates(ready, wanted)
        decisions = []
        for sequence, candidate, most, depth in zip(
            ready, candidates, wanted, self.depth.decide(candidates), strict=True
        ):
            sequence.depth = depth
            if most:  # otherwise nobody wanted a draft: no decision, no fallback
                decisions.append((candidate.category, depth, candidate.max_depth > 0))
        for decision, same in groupby(decisions):
            self.traffic.decided(*decision, count=len(list(same)))

    def _leave_out(self, ready: Seq[Sequence]) -> None:
        for sequence in ready:
            sequence.depth = 0
        classes = Counter([traffic_class(sequence) for sequence in ready if sequence.speculation.enabled])
        for category, count in classes.items():
            self.traffic.had_no_room(category, count)

    def switch(self, enabled: bool | None) -> None:
        """On, off, or as configured; `look_ahead` makes it so."""
        self.enabled = self._configured if enabled is None else enabled

    def move(self, sequence: Sequence, method: str) -> None:
        """Draft it by another method from now on."""
        self.forget((sequence,))
        sequence.method = method

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """These sequences ended or lost their place: drop all that was kept for drafting them."""
        for sequence in sequences:
            sequence.depth = 0
            self.proposers[sequence.method].close([sequence.id])
            self._ended.append(sequence.id)

    def _take_reading(self, method: str) -> None:
        self._reading[method] += take_reading(self.proposers[method])

    def _settle(self) -> None:
        """A sequence's last round is observed after it was forgotten: only now is all said about it."""
        self._start_over(self.traffic.close(self._ended))
        self._ended.clear()

    def _start_over(self, changes: Iterable[Change]) -> None:
        """These classes of traffic are no longer what depth was learned from."""
        for change in changes:
            self.depth.restart(change.category, change.after)

    def _max_depth(self, sequence: Sequence) -> int:
        return self._intake.max_depth(sequence, forks(self.proposers[sequence.method]))

    def _progress(self, sequence: Sequence, hidden: Hidden | None, picks: Seq[int] = ()) -> Progress:
        return Progress.of(sequence, self._intake.remaining(sequence) - 1, hidden, picks)

    def _candidates(self, ready: Iterable[Sequence], wanted: Iterable[int]) -> list[Candidate]:
        """How deep each sequence may go: as its request and the server, who have it `wanted`, and the breaker of its traffic
        class allow."""
        allowed: dict[str, int] = {}
        candidates, now = [], self._clock.now()
        for sequence, most in zip(ready, wanted, strict=True):
            category = traffic_class(sequence)
            if category not in allowed:
                allowed[category] = self.traffic.breaker.allow(category, now)
            max_depth = most if allowed[category] > 0 else 0
            allowed[category] -= max_depth > 0
            remaining = self._intake.remaining(sequence)
            candidates.append(Candidate(sequence.id, category, max_depth, len(sequence.ids), remaining))
        return candidates
