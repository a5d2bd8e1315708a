"""The depth of the next draft of every sequence: limits of request, server and breaker, then the depth policy."""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import groupby

from paceline.core.clock import Clock
from paceline.core.sequence import Sequence
from paceline.core.traffic import TrafficClass
from paceline.engine.drafting.trial_traffic import TrialTraffic
from paceline.engine.isolation.proposer_guard import ProposerGuard
from paceline.engine.stats import TrafficStatistics
from paceline.engine.validator import RequestValidator
from paceline.speculation.depth.policy import DepthCandidate, DepthPolicy
from paceline.speculation.proposer import Proposer


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
