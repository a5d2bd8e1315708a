"""The engine's side of speculation: asks proposers for drafts, learns from rounds, and decides how deep the next one goes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from paceline.core.clock import Clock
from paceline.core.sequence import Sequence
from paceline.engine.intake import Intake
from paceline.engine.scheduler import Schedule
from paceline.engine.snapshot import TrafficReport
from paceline.engine.tally import BREAKER, DECLINED, NO_DRAFT, NO_ROOM, Tally
from paceline.speculation.breaker import Breaker
from paceline.speculation.depth.policy import Candidate, DepthPolicy, RoundObservation, StepObservation
from paceline.speculation.drafts import Draft
from paceline.speculation.proposer import Progress, Proposer
from paceline.speculation.trees import InvalidDraft, depths, prune, validate
from paceline.speculation.verification import Verdict


def traffic_class(sequence: Sequence) -> str:
    """What acceptance depends on: how tokens are guessed, and what kind of text they are."""
    return f"{sequence.method}/{sequence.category}"


class Speculator:
    """Proposers by method, one depth policy, one breaker, one switch."""

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
        self.breaker = breaker
        self.enabled = enabled
        self.num_invalid = 0
        """Drafts dropped because they were none: not a tree, or not of this vocabulary."""
        self._configured = enabled
        self._tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self._intake = intake
        self._clock = clock
        self._vocab_size = vocab_size
        self._patience = 0.0
        self._draft_seconds = 0.0

    def propose(self, plan: Schedule) -> dict[int, Draft]:
        """Whatever the proposers have ready, cut to the room that was reserved for it."""
        room = {item.sequence.id: item.num_draft for item in plan.items if item.num_draft}
        asked: defaultdict[str, list[int]] = defaultdict(list)
        for item in plan.items:
            if item.num_draft:
                asked[item.sequence.method].append(item.sequence.id)
        started = self._clock.now()
        # Waiting for a draft longer than the target takes to do without it cannot pay.
        deadline = started + self._patience
        drafts: dict[int, Draft] = {}
        for method, ids in asked.items():
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
        self._draft_seconds += self._clock.now() - started
        return drafts

    def learn(
        self, plan: Schedule, drafts: Mapping[int, Draft], verdicts: Mapping[int, Verdict], verify_seconds: float
    ) -> None:
        """Tell the depth policy and the breaker what this round brought and what it cost."""
        self._patience = verify_seconds
        draft_seconds, self._draft_seconds = self._draft_seconds, 0.0
        if not self.enabled:
            return
        rounds, now = [], self._clock.now()
        for item in plan.items:
            category = traffic_class(item.sequence)
            if item.num_draft:
                draft, path = drafts.get(item.sequence.id), verdicts[item.sequence.id].path
                levels = max(depths(draft.parents)) if draft else 0
                rounds.append(RoundObservation(item.sequence.id, category, levels, len(path), asked=item.num_draft))
                if levels:
                    self._tallies[category].round(levels, len(path))
                    self.breaker.record(category, levels, len(path), now, self.depth.advantage)
                else:
                    self._tallies[category].fallback(NO_DRAFT)
            elif item.sequence.depth:
                self._tallies[category].fallback(NO_ROOM)
        num_committed = sum(item.num_tokens for item in plan.items)
        self.depth.observe(
            StepObservation(
                batch=len(verdicts),
                rows=len(verdicts) + sum(len(draft) for draft in drafts.values()),
                prefill_rows=num_committed - len(verdicts),
                draft_seconds=draft_seconds,
                verify_seconds=verify_seconds,
                network_seconds=0.0,
                max_depth=max((round_.asked for round_ in rounds), default=0),
                rounds=tuple(rounds),
            )
        )

    def look_ahead(self, running: Iterable[Sequence]) -> None:
        """Decide every sequence's next depth and let the proposers know what was committed."""
        if not self.enabled:
            for sequence in running:
                sequence.depth = 0
            return
        ready = [sequence for sequence in running if sequence.num_uncomputed == 1]
        candidates = self._candidates(ready)
        progress: defaultdict[str, list[Progress]] = defaultdict(list)
        for sequence, candidate, depth in zip(ready, candidates, self.depth.decide(candidates), strict=True):
            sequence.depth = depth
            self._count(sequence, candidate, depth)
            progress[sequence.method].append(_progress(sequence))
        started = self._clock.now()
        for method, batch in progress.items():
            self.proposers[method].observe(batch)
        self._draft_seconds += self._clock.now() - started

    def switch(self, enabled: bool | None) -> None:
        """On, off, or as configured; `look_ahead` makes it so."""
        self.enabled = self._configured if enabled is None else enabled

    def move(self, sequence: Sequence, method: str) -> None:
        """Draft it by another method from now on."""
        self.forget((sequence,))
        sequence.method = method

    def report(self) -> tuple[TrafficReport, ...]:
        """Every class of traffic so far."""
        reports = []
        for name, tally in self._tallies.items():
            method, _, category = name.partition("/")
            reports.append(tally.report(method, category, self.breaker.state(name)))
        return tuple(reports)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """These sequences ended or lost their place: drop all that was kept for drafting them."""
        for sequence in sequences:
            sequence.depth = 0
            self.proposers[sequence.method].close([sequence.id])

    def _candidates(self, ready: Iterable[Sequence]) -> list[Candidate]:
        """How deep each sequence may go: as its request, the server and the breaker of its traffic class allow."""
        allowed: dict[str, int] = {}
        candidates, now = [], self._clock.now()
        for sequence in ready:
            category = traffic_class(sequence)
            if category not in allowed:
                allowed[category] = self.breaker.allow(category, now)
            max_depth = self._intake.max_depth(sequence) if allowed[category] > 0 else 0
            allowed[category] -= max_depth > 0
            candidates.append(Candidate(sequence.id, category, max_depth))
        return candidates

    def _count(self, sequence: Sequence, candidate: Candidate, depth: int) -> None:
        if self._intake.max_depth(sequence) == 0:  # nobody wanted a draft: no decision, no fallback
            return
        tally = self._tallies[candidate.category]
        tally.depth(depth)
        if depth == 0:
            tally.fallback(DECLINED if candidate.max_depth else BREAKER)


def _progress(sequence: Sequence) -> Progress:
    return Progress(
        sequence_id=sequence.id,
        ids=sequence.ids,
        depth=sequence.depth,
        sampling=sequence.sampling,
        seed=sequence.seed,
        choice=sequence.choice,
        num_prompt=sequence.num_prompt,
        verification=sequence.verification,
        cache_salt=sequence.cache_salt,
    )
