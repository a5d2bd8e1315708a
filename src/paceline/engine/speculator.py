"""The engine's side of speculation: it collects drafts from proposers, learns from rounds and decides the next depths."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import groupby

from paceline.core.clock import Clock
from paceline.core.sequence import Sequence
from paceline.core.worker_status import TrafficStatus
from paceline.engine.executors.executor import SequenceResult, StepResult
from paceline.engine.isolation.proposer_guard import ProposerGuard
from paceline.engine.schedule import Schedule
from paceline.engine.stats import StepTotals, TrafficClasses, traffic_class
from paceline.engine.validator import RequestValidator
from paceline.speculation.depth.acceptance import PRIOR_ALPHA
from paceline.speculation.depth.breaker import Breaker
from paceline.speculation.depth.drift import Change
from paceline.speculation.depth.policy import (
    Candidate,
    DepthPolicy,
    DraftingObservation,
    RoundObservation,
    StepObservation,
)
from paceline.speculation.drafts import Draft, DraftPrefill
from paceline.speculation.proposer import (
    Hidden,
    HiddenRequest,
    Progress,
    Proposer,
)
from paceline.speculation.trees.tree import InvalidDraft, prune, validate
from paceline.speculation.verification.verify import Verdict


class Speculator:
    """Proposers by method, a depth policy, an on/off switch, and statistics by traffic class."""

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        depth: DepthPolicy,
        breaker: Breaker,
        validator: RequestValidator,
        clock: Clock,
        vocab_size: int,
        enabled: bool = True,
        graph_methods: frozenset[str] = frozenset(),
    ) -> None:
        """`graph_methods`: methods that draft inside graph steps, which time them. A host step of such a method only starts
        it or computes its draft prefill, so that its time is not typical."""
        self.proposers = proposers
        self.depth = depth
        self.enabled = enabled
        self.traffic = TrafficClasses(breaker)
        self.totals = StepTotals()
        self.num_invalid = 0
        """Invalid drafts, which were dropped: not a tree, or tokens outside the vocabulary."""
        self.graph_methods = graph_methods
        self._guard = ProposerGuard(proposers)
        self._configured = enabled
        self._validator = validator
        self._clock = clock
        self._vocab_size = vocab_size
        self._max_wait = 0.0
        self._ended: list[int] = []
        """Sequences that ended since the last observed step."""
        self._draft_seconds: defaultdict[str, float] = defaultdict(float)
        self._network_seconds = 0.0
        self._behind: set[int] = set()
        """Sequences without a draft in this step because their draft prefill goes on."""
        self._prefills: defaultdict[str, DraftPrefill] = defaultdict(DraftPrefill)
        """Draft prefills by method since the last observed step of the method."""
        self._labels: dict[str, str] = {}
        """By method: the end of its traffic classes while another draft is tried."""
        self._idle_since: float | None = None
        self._idle_seconds = 0.0

    def propose(self, schedule: Schedule) -> dict[int, Draft]:
        """The drafts that are ready in time, by sequence, each cut to the rows reserved for it."""
        limits = {item.sequence.id: item.num_draft for item in schedule.items if item.num_draft}
        by_method: defaultdict[str, list[int]] = defaultdict(list)
        drafts: dict[int, Draft] = {}
        for item in schedule.items:
            if item.num_draft and item.sequence.draft is not None:  # the request brought its draft, a chain
                tokens = item.sequence.draft[: item.num_draft]
                drafts[item.sequence.id] = Draft(tokens, tuple(range(-1, len(tokens) - 1)))
            elif item.num_draft:
                by_method[item.sequence.method].append(item.sequence.id)
        # A wait longer than a pass of the target cannot pay.
        deadline = self._clock.now() + self._max_wait
        for method, ids in by_method.items():
            started = self._clock.now()
            collected, cost = self._guard.collect(method, ids, deadline)
            for sequence_id, draft in collected.items():
                if sequence_id not in limits:
                    continue
                draft = prune(draft, limits[sequence_id])
                try:
                    validate(draft, self._vocab_size)
                except InvalidDraft:
                    self.num_invalid += 1
                else:
                    drafts[sequence_id] = draft
            took = self._clock.now() - started
            network, prefill = min(took, cost.network_seconds), cost.prefill
            self._network_seconds += network
            self._behind |= cost.behind
            self.add_draft_prefill(method, prefill)
            self._draft_seconds[method] += max(0.0, took - network - prefill.seconds)
        return drafts

    def add_draft_prefill(self, method: str, prefill: DraftPrefill) -> None:
        """Report a draft prefill; the next step that drafts by `method` carries its cost."""
        self._prefills[method] += prefill

    def learn(self, result: StepResult) -> None:
        """Report the outcome and the cost of a committed step to the depth policy, the breaker and the statistics."""
        rounds, num_prompt, batch = [], 0, 0
        for one in result.sequences:
            if one.verdict is None or one.sequence.draft is not None:
                num_prompt += one.num_tokens + one.num_nodes
                continue
            batch += 1
            num_prompt += one.num_tokens - 1
            if one.asked:
                rounds.append(one)
            elif one.sequence.depth and self.enabled:
                self.traffic.count_no_room(self._class(one.sequence))
        if result.draft_seconds is not None:  # a graph step, with drafts of one method
            draft_seconds: Mapping[str, float] = {one.sequence.method: result.draft_seconds for one in rounds}
            network, is_timed = 0.0, result.is_timed
        else:
            self._idle_since = None  # the host had work to do: the device did not wait for a change of executors
            self._max_wait = result.verify_seconds
            draft_seconds, self._draft_seconds = self._draft_seconds, defaultdict(float)
            network, self._network_seconds = self._network_seconds, 0.0
            is_timed = not any(one.sequence.method in self.graph_methods for one in result.sequences)
        prefills = defaultdict(DraftPrefill, {m: self._prefills.pop(m, DraftPrefill()) for m in draft_seconds})
        prefill_seconds = sum(prefill.seconds for prefill in prefills.values())
        idle, self._idle_seconds = max(0.0, self._idle_seconds - prefill_seconds), 0.0
        drafted = sum(draft_seconds.values()) + prefill_seconds
        self.totals.add(num_prompt, bool(rounds), drafted, network, result.verify_seconds)
        if not self.enabled:
            self._end_sequences()
            return
        observed = tuple([self._observation(one) for one in rounds])
        self._behind.clear()
        self._restart(self.traffic.observe(observed, self._clock.now(), self.depth.advantage))
        deepest: dict[str, int] = {}
        for one in rounds:
            method = one.sequence.method
            deepest[method] = max(deepest.get(method, 0), one.asked)
        self.depth.observe(
            StepObservation(
                batch=batch,
                rows=result.rows,
                prefill_rows=num_prompt,
                drafting=tuple(
                    DraftingObservation(
                        method, depth, draft_seconds[method], prefills[method].tokens, prefills[method].seconds
                    )
                    for method, depth in deepest.items()
                ),
                verify_seconds=result.verify_seconds,
                network_seconds=network,
                rounds=observed,
                context=result.context,
                is_timed=is_timed,
                slots=result.slots,
                switch_on_seconds=idle if rounds else 0.0,
            )
        )
        self._end_sequences()

    def graph_paused(self) -> None:
        """The graph executor handed its sequences to the host: the device waits until the next graph step."""
        self._idle_since = self._clock.now()

    def graph_resumed(self) -> None:
        """The graph executor submitted a step."""
        if self._idle_since is not None:
            self._idle_seconds, self._idle_since = self._clock.now() - self._idle_since, None

    def hidden_requests(self, schedule: Schedule) -> dict[str, HiddenRequest]:
        """The hidden states that the proposers of this step's sequences draft from, by method."""
        if not self.enabled:
            return {}
        methods = {item.sequence.method for item in schedule.items if item.sequence.speculation.enabled}
        return {method: hidden for method in methods if (hidden := self.proposers[method].traits.hidden)}

    def prepare_next(
        self,
        running: Seq[Sequence],
        verdicts: Mapping[int, Verdict] | None = None,
        hidden: Mapping[int, Hidden] | None = None,
        has_room: bool = True,
    ) -> None:
        """Decide the next depth of every sequence and report the committed tokens to the proposers.

        `verdicts` and `hidden`: the target's picks and hidden states of the step just committed. `has_room`: the next pass has
        rows for drafts. Without room only methods that draft on the host are decided for: they draft for the pass after it.
        """
        if not self.enabled:
            for sequence in running:
                sequence.depth = 0
            return
        verdicts, hidden = verdicts or {}, hidden or {}
        ready = [sequence for sequence in running if sequence.num_uncomputed == 1 and sequence.draft is None]
        if has_room or not all(sequence.method in self.graph_methods for sequence in ready):
            self.decide(ready)
        else:
            self._skip_drafts(ready)
        progress: defaultdict[str, list[Progress]] = defaultdict(list)
        is_lazy = {method: proposer.traits.is_lazy for method, proposer in self.proposers.items()}
        for sequence in ready:
            if sequence.depth == 0 and is_lazy[sequence.method]:
                continue
            verdict = verdicts.get(sequence.id)
            picks = verdict.picks if verdict else ()
            progress[sequence.method].append(self._progress(sequence, hidden.get(sequence.id), picks))
        for sequence in running:
            if sequence.num_uncomputed > 1 and sequence.id in hidden:
                progress[sequence.method].append(self._progress(sequence, hidden[sequence.id]))
        for method, batch in progress.items():
            started = self._clock.now()
            self._guard.observe(method, batch)
            self._draft_seconds[method] += self._clock.now() - started

    def add_hidden_states(self, sequence: Sequence, states: Seq[Hidden]) -> None:
        """Report hidden states of its prompt that another worker computed."""
        request = self.proposers[sequence.method].traits.hidden
        if request is None or request.last or not (self.enabled and sequence.speculation.enabled):
            return
        for hidden in states:
            if set(request.layers) <= set(hidden.inner):
                self._guard.observe(sequence.method, [self._progress(sequence, hidden)])

    def decide(self, ready: Seq[Sequence]) -> None:
        """Set the depth of sequences that are about to decode."""
        if not self.enabled or self.depth.skip_step(len(ready)):
            for sequence in ready:
                sequence.depth = 0
            if self.enabled:
                self.traffic.count_declined(
                    [self._class(sequence) for sequence in ready if sequence.speculation.enabled]
                )
            return
        limits = [self._max_depth(sequence) for sequence in ready]
        if not any(limits):  # the policy has nothing to decide
            for sequence in ready:
                sequence.depth = 0
            return
        candidates = self._candidates(ready, limits)
        decisions = []
        for sequence, candidate, most, depth in zip(
            ready, candidates, limits, self.depth.decide(candidates), strict=True
        ):
            sequence.depth = depth
            if most:  # a request without speculation is neither a decision nor a fallback
                decisions.append((candidate.category, depth, candidate.max_depth > 0))
        for decision, same in groupby(decisions):
            self.traffic.count_decision(*decision, count=len(list(same)))

    def _skip_drafts(self, ready: Seq[Sequence]) -> None:
        for sequence in ready:
            sequence.depth = 0
        classes = Counter([self._class(sequence) for sequence in ready if sequence.speculation.enabled])
        for category, count in classes.items():
            self.traffic.count_no_room(category, count)

    def set_enabled(self, enabled: bool | None) -> None:
        """Turn speculation on, off, or (None) as configured; in effect from the next `prepare_next`."""
        self.enabled = self._configured if enabled is None else enabled

    def set_method(self, sequence: Sequence, method: str) -> None:
        """Draft for the sequence by another method."""
        self.forget((sequence,))
        sequence.method = method

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Close sequences that ended or were preempted at their proposers."""
        for sequence in sequences:
            sequence.depth = 0
            self._guard.close(sequence.method, sequence.id)
            self._ended.append(sequence.id)

    def _end_sequences(self) -> None:
        """The last round of a sequence is observed after `forget`: only now its statistics are complete."""
        self._restart(self.traffic.close(self._ended))
        self._ended.clear()

    def _restart(self, changes: Iterable[Change]) -> None:
        """Restart the depth policy for traffic classes that changed."""
        for change in changes:
            self.depth.restart(change.category, change.after)

    def _max_depth(self, sequence: Sequence) -> int:
        if self._guard.excludes(sequence.id):
            return 0
        return self._validator.max_depth(sequence, self.proposers[sequence.method].traits.is_tree)

    def _progress(self, sequence: Sequence, hidden: Hidden | None, picks: Seq[int] = ()) -> Progress:
        return Progress.of(sequence, self._validator.remaining(sequence) - 1, hidden, picks)

    def _candidates(self, ready: Iterable[Sequence], limits: Iterable[int]) -> list[Candidate]:
        """Candidates with the depth that request and server (`limits`) and the breaker of the traffic class allow."""
        allowed: dict[str, int] = {}
        candidates, now = [], self._clock.now()
        for sequence, most in zip(ready, limits, strict=True):
            category = self._class(sequence)
            if category not in allowed:
                allowed[category] = self.traffic.breaker.allow(category, now)
            max_depth = most if allowed[category] > 0 else 0
            allowed[category] -= max_depth > 0
            remaining = self._validator.remaining(sequence)
            num_tokens, num_prompt = len(sequence.ids), sequence.num_prompt
            candidates.append(Candidate(sequence.id, category, max_depth, num_tokens, remaining, num_prompt))
        return candidates

    def label(self, methods: Iterable[str], label: str) -> None:
        """Learn the acceptance of these methods in traffic classes that end with `label`, apart from what is known; empty: in
        the classes of before. The class of a running sequence changes with the label."""
        self._labels.update(dict.fromkeys(methods, label))

    def forget_label(self, methods: Collection[str], label: str) -> None:
        """Discard what was learned under `label`."""
        for status in self._labelled(methods, label):
            self._restart_class(f"{status.method}/{status.category}", PRIOR_ALPHA)

    def adopt_label(self, methods: Collection[str], label: str) -> None:
        """Let what was learned under `label` hold for the classes without it."""
        for status in self._labelled(methods, label):
            if status.alphas:
                self._restart_class(f"{status.method}/{status.category.removesuffix(label)}", status.alphas[0])

    def _labelled(self, methods: Collection[str], label: str) -> list[TrafficStatus]:
        report = self.traffic.report()
        return [status for status in report if status.method in methods and status.category.endswith(label)]

    def _restart_class(self, category: str, alpha: float) -> None:
        self.traffic.restart(category)
        self.depth.restart(category, alpha)

    def _class(self, sequence: Sequence) -> str:
        """The traffic class of a sequence with the draft that is in use."""
        name = traffic_class(sequence) + self._labels.get(sequence.method, "")
        label = self.proposers[sequence.method].traits.label
        return name if label is None else name + label(sequence.id)

    def _observation(self, one: SequenceResult) -> RoundObservation:
        assert one.verdict is not None
        path = one.verdict.path
        return RoundObservation(
            one.sequence.id,
            self._class(one.sequence),
            one.levels,
            len(path),
            one.asked,
            one.num_nodes,
            path,
            one.sequence.id in self._behind,
        )
