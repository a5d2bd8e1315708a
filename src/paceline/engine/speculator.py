"""The engine's side of speculation: it collects drafts from proposers, learns from rounds and decides the next depths.

`DepthDecisions` decides the depth of the next draft of every sequence: first the limits of the request, the server and the
breaker apply, then the depth policy.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import groupby

from paceline.core.clock import Clock
from paceline.core.sequence import Sequence
from paceline.core.traffic import TrafficClass
from paceline.engine.failures import ProposerGuard
from paceline.engine.observation import DraftCostMeter, StepContents, observe_rounds, observe_step
from paceline.engine.step.step import Schedule, StepResult
from paceline.engine.traffic import StepTotals, TrafficStatistics, TrialTraffic
from paceline.policy.depth.breaker import Breaker
from paceline.policy.depth.drift import AcceptanceChange
from paceline.policy.depth.observation import DepthCandidate, DepthPolicy
from paceline.requests import RequestValidator
from paceline.speculation import HiddenRequest, HiddenRows, Proposer, SequenceProgress
from paceline.speculation.drafts import Draft, DraftPrefill
from paceline.speculation.verification import InvalidDraft, Verdict, prune, validate


class DepthDecisions:
    """Sets `Sequence.depth`, and counts the decisions and the reasons for plain decoding."""

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        traffic: TrafficStatistics,
        trials: TrialTraffic,
        guard: ProposerGuard,
        validator: RequestValidator,
        clock: Clock,
    ) -> None:
        self._proposers, self._traffic, self._trials = proposers, traffic, trials
        self._guard, self._validator, self._clock = guard, validator, clock

    def decide(self, ready: Seq[Sequence], policy: DepthPolicy, prompt_rows: int) -> None:
        """Set the depth of sequences that are about to decode. `prompt_rows` is the number of prompt rows still to be
        computed."""
        policy.expect_prompts(prompt_rows)
        if policy.skip_step(len(ready)):
            set_plain(ready)
            self._traffic.count_declined(self._classes(ready))
            return
        limits = [self._max_depth(sequence) for sequence in ready]
        if not any(limits):  # the policy has nothing to decide
            set_plain(ready)
            return
        candidates = self._candidates(ready, limits)
        decisions = []
        for sequence, candidate, most, depth in zip(ready, candidates, limits, policy.decide(candidates), strict=True):
            sequence.depth = depth
            if most:  # a request without speculation is neither a decision nor a fallback
                decisions.append((candidate.traffic, depth, candidate.max_depth > 0))
        for decision, same in groupby(decisions):
            self._traffic.count_decision(*decision, count=len(list(same)))

    def skip(self, ready: Seq[Sequence]) -> None:
        """The next pass has no rows for drafts: these sequences decode plainly."""
        set_plain(ready)
        for traffic, count in Counter(self._classes(ready)).items():
            self._traffic.count_no_room(traffic, count)

    def _classes(self, ready: Seq[Sequence]) -> list[TrafficClass]:
        """The traffic classes of the sequences that may draft by their request."""
        return [self._trials.class_of(sequence) for sequence in ready if sequence.speculation.enabled]

    def _max_depth(self, sequence: Sequence) -> int:
        """The depth that request and server allow."""
        if self._guard.excludes(sequence.id):
            return 0
        return self._validator.max_depth(sequence, self._proposers[sequence.method].traits.is_tree)

    def _candidates(self, ready: Iterable[Sequence], limits: Iterable[int]) -> list[DepthCandidate]:
        """Candidates with the depth that `limits` and the breaker of the traffic class allow."""
        allowed: dict[TrafficClass, int] = {}
        candidates, now = [], self._clock.now()
        for sequence, most in zip(ready, limits, strict=True):
            traffic = self._trials.class_of(sequence)
            if traffic not in allowed:
                allowed[traffic] = self._traffic.breaker.allow(traffic, now)
            max_depth = most if allowed[traffic] > 0 else 0
            allowed[traffic] -= max_depth > 0
            remaining = self._validator.remaining(sequence)
            num_tokens, num_prompt = len(sequence.ids), sequence.num_prompt
            candidates.append(DepthCandidate(sequence.id, traffic, max_depth, num_tokens, remaining, num_prompt))
        return candidates


def set_plain(sequences: Iterable[Sequence]) -> None:
    """These sequences decode without drafts in the next step."""
    for sequence in sequences:
        sequence.depth = 0


class Speculator:
    """Proposers by method, a depth policy, an on/off switch, and statistics by traffic class.

    In every step the executors call `propose` before the target's pass, the committer calls `learn` after it, and
    `prepare_next` decides for the next step.
    """

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
        """`graph_methods` are the methods that draft inside graph steps, which time them. A host step of such a method only
        starts it or computes its draft prefill, so that its time is not typical."""
        self.proposers = proposers
        self.depth = depth
        self.enabled = enabled
        self.traffic = TrafficStatistics(breaker)
        self.totals = StepTotals()
        self.num_invalid = 0
        """Invalid drafts, which were dropped: not a tree, or tokens outside the vocabulary."""
        self.graph_methods = graph_methods
        self._configured = enabled
        self._validator, self._clock, self._vocab_size = validator, clock, vocab_size
        self._guard = ProposerGuard(proposers)
        self._costs = DraftCostMeter(clock, graph_methods)
        self._trials = TrialTraffic(proposers, self.traffic)
        self._depths = DepthDecisions(proposers, self.traffic, self._trials, self._guard, validator, clock)
        self._behind: set[int] = set()
        """Sequences without a draft in this step because their draft prefill goes on."""
        self._ended: list[int] = []
        """Sequences that ended since the last observed step."""

    # ---------------------------------------------------------------- a step

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
        deadline = self._costs.deadline()
        for method, ids in by_method.items():
            started = self._clock.now()
            collected, cost = self._guard.collect(method, ids, deadline)
            drafts.update(self._valid(collected, limits))
            self._costs.add_collect(method, self._clock.now() - started, cost)
            self._behind |= cost.behind
        return drafts

    def hidden_requests(self, schedule: Schedule) -> dict[str, HiddenRequest]:
        """The hidden states that the proposers of this step's sequences draft from, by method."""
        if not self.enabled:
            return {}
        methods = {item.sequence.method for item in schedule.items if item.sequence.speculation.enabled}
        return {method: hidden for method in methods if (hidden := self.proposers[method].traits.hidden)}

    def learn(self, result: StepResult) -> None:
        """Report the outcome and the cost of a committed step to the depth policy, the breaker and the statistics."""
        contents = StepContents.of(result)
        cost = self._costs.take(result, contents.rounds)
        prefill, drafted = contents.prefill_rows, bool(contents.rounds)
        self.totals.add(prefill, drafted, cost.total_draft_seconds, cost.network_seconds, result.verify_seconds)
        if self.enabled:
            for sequence in contents.plain:
                if sequence.depth:
                    self.traffic.count_no_room(self._trials.class_of(sequence))
            rounds = observe_rounds(contents.rounds, self._trials.class_of, self._behind)
            self._behind.clear()
            self._restart(self.traffic.observe(rounds, self._clock.now(), self.depth.advantage))
            self.depth.observe(observe_step(result, contents, cost, rounds))
        # The last round of a sequence is observed after `forget`, so that its statistics are complete only now
        self._restart(self.traffic.close(self._ended))
        self._ended.clear()

    def prepare_next(
        self,
        running: Seq[Sequence],
        verdicts: Mapping[int, Verdict] | None = None,
        hidden: Mapping[int, HiddenRows] | None = None,
        has_room: bool = True,
        prompt_rows: int = 0,
    ) -> None:
        """Decide the next depth of every sequence and report the committed tokens to the proposers.

        `verdicts` and `hidden` are the target's picks and hidden states of the step just committed. `has_room` is true if the
        next pass has rows and time for drafts. Without room, a depth is decided only for methods that draft in other processes:
        they draft for the pass after it. `prompt_rows` is the number of prompt tokens still to be computed.
        """
        if not running:
            self._costs.has_ended()
        if not self.enabled:
            set_plain(running)
            return
        ready = [sequence for sequence in running if sequence.num_uncomputed == 1 and sequence.draft is None]
        elsewhere = [sequence for sequence in ready if self.proposers[sequence.method].traits.is_remote]
        if has_room or elsewhere:
            self.decide(ready if has_room else elsewhere, prompt_rows)
        if not has_room:
            self.skip([sequence for sequence in ready if not self.proposers[sequence.method].traits.is_remote])
        for method, batch in self._progress_by_method(running, ready, verdicts or {}, hidden or {}).items():
            started = self._clock.now()
            self._guard.observe(method, batch)
            self._costs.add_observe(method, self._clock.now() - started)

    def decide(self, ready: Seq[Sequence], prompt_rows: int = 0) -> None:
        """Set the depth of sequences that are about to decode. `prompt_rows` as in `prepare_next`."""
        if self.enabled:
            self._depths.decide(ready, self.depth, prompt_rows)
        else:
            set_plain(ready)

    def skip(self, ready: Seq[Sequence]) -> None:
        """These sequences decode plainly in the next step, which has no room for drafts."""
        if self.enabled:
            self._depths.skip(ready)
        else:
            set_plain(ready)

    # ---------------------------------------------------------------- reports of other parts

    def add_draft_prefill(self, method: str, prefill: DraftPrefill) -> None:
        """Report a draft prefill; the next step that drafts by `method` carries its cost."""
        self._costs.add_prefill(method, prefill)

    def graph_paused(self) -> None:
        """The graph executor handed its sequences to the host: the device waits until the next graph step."""
        self._costs.graph_paused()

    def graph_resumed(self) -> None:
        """The graph executor submitted a step."""
        self._costs.graph_resumed()

    def add_hidden_states(self, sequence: Sequence, states: Seq[HiddenRows]) -> None:
        """Report hidden states of its prompt that another worker computed."""
        request = self.proposers[sequence.method].traits.hidden
        if request is None or request.last or not (self.enabled and sequence.speculation.enabled):
            return
        for hidden in states:
            if set(request.layers) <= set(hidden.by_layer):
                self._guard.observe(sequence.method, [self._progress(sequence, hidden)])

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Close sequences that ended or were preempted at their proposers."""
        for sequence in sequences:
            sequence.depth = 0
            self._guard.close(sequence.method, sequence.id)
            self._ended.append(sequence.id)

    # ---------------------------------------------------------------- control

    def set_enabled(self, enabled: bool | None) -> None:
        """Turn speculation on, off, or (None) as configured; in effect from the next `prepare_next`."""
        self.enabled = self._configured if enabled is None else enabled

    def set_method(self, sequence: Sequence, method: str) -> None:
        """Draft for the sequence by another method."""
        self.forget((sequence,))
        sequence.method = method

    def set_trial(self, methods: Iterable[str], on_trial: bool) -> None:
        """Learn the acceptance of these methods in the traffic classes of the draft on trial, apart from what is known, or
        again in those of the draft in use. The class of a running sequence changes too."""
        self._trials.set(methods, on_trial)

    def forget_trial(self, methods: Collection[str]) -> None:
        """Discard what was learned of the draft on trial."""
        self._restart_classes(self._trials.forget(methods))

    def adopt_trial(self, methods: Collection[str]) -> None:
        """Let what was learned of the draft on trial hold for the draft in use."""
        self._restart_classes(self._trials.adopt(methods))

    def _valid(self, collected: Mapping[int, Draft], limits: Mapping[int, int]) -> dict[int, Draft]:
        """The valid drafts of sequences with rows, cut to their rows (`limits`)."""
        drafts = {}
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
        return drafts

    def _progress_by_method(
        self,
        running: Seq[Sequence],
        ready: Seq[Sequence],
        verdicts: Mapping[int, Verdict],
        hidden: Mapping[int, HiddenRows],
    ) -> Mapping[str, list[SequenceProgress]]:
        """What proposers observe: sequences that decode next (`ready`), then prompts with new hidden states."""
        progress: defaultdict[str, list[SequenceProgress]] = defaultdict(list)
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
        return progress

    def _progress(self, sequence: Sequence, hidden: HiddenRows | None, picks: Seq[int] = ()) -> SequenceProgress:
        return SequenceProgress.of(sequence, self._validator.remaining(sequence) - 1, hidden, picks)

    def _restart(self, changes: Iterable[AcceptanceChange]) -> None:
        """Restart the depth policy for traffic classes that changed."""
        for change in changes:
            self.depth.restart(change.traffic, change.after)

    def _restart_classes(self, alphas: Mapping[TrafficClass, float]) -> None:
        """Restart all that was learned of these traffic classes; `alphas` is their new acceptance."""
        for traffic, alpha in alphas.items():
            self.traffic.restart(traffic)
            self.depth.restart(traffic, alpha)
