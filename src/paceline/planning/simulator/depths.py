"""The production depth policy in the simulation: its decisions, and the observations that it learns from."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.core.traffic import TrafficClass
from paceline.planning import WorkerProfile
from paceline.planning.simulator.job import SimulatedRequest
from paceline.planning.simulator.rounds import Rounds, SimulatedRound
from paceline.policy.cost.curve import LinearCost
from paceline.policy.depth.allocation import PaddedBatch
from paceline.policy.depth.goodput import GoodputDepth
from paceline.policy.depth.observation import DepthCandidate, DraftingObservation, RoundObservation, StepObservation
from paceline.policy.step import DRAFT_PREFILL_SLOWDOWN, padded_size

METHOD = "draft_model"
TRAFFIC = TrafficClass(METHOD, "simulated")


class PolicyDepths:
    """`goodput` of one worker. It starts from the times of passes and drafts in the profile, as a worker does from its warm-up.

    A sequence that did not join a batch that drafts has its draft prefill during the step in which it is first to draft, and no
    draft in that step. A device that pads its passes (`WorkerProfile.is_padded`) has as many rows for every slot as for the
    deepest draft. In a step with prompts it has as many for every sequence.
    """

    def __init__(self, profile: WorkerProfile, max_depth: int, on_device: bool = True) -> None:
        """`on_device` is true if the target's device computes the prompts of the draft model."""
        self._max_depth, self._is_padded = max_depth, profile.is_padded
        padded = PaddedBatch(frozenset({METHOD}), padded_size, lambda depth: depth)
        self._policy = GoodputDepth(max_depth, padded=(padded,) if profile.is_padded else ())
        self._policy.calibrate(dict(profile.pass_seconds.points), profile.context_seconds.value)
        lines = {sequences: LinearCost(0.0, seconds) for sequences, seconds in profile.draft_seconds.points}
        self._policy.calibrate_drafts(METHOD, lines, profile.draft_prefill_seconds.value)
        self._context_seconds = profile.context_seconds.value
        self._row_seconds = DRAFT_PREFILL_SLOWDOWN * profile.draft_prefill_seconds.value if on_device else 0.0
        self._behind: dict[int, int] = {}
        """Depth that was granted to each sequence that has a draft prefill in the present step."""
        self._prefill_tokens = 0

    def decide(self, jobs: Sequence[SimulatedRequest], prompt_rows: int = 0) -> list[int]:
        plain = self.skip(jobs)
        self._policy.expect_prompts(prompt_rows)
        if self._policy.skip_step(len(jobs)):
            return plain
        depths = self._policy.decide([self._candidate(job) for job in jobs])
        if self._row_seconds:
            drafting = sum(depth > 0 for depth in depths)
            for i, job in enumerate(jobs):
                if depths[i] and not job.has_draft:
                    job.has_draft = True
                    self._behind[job.id] = depths[i]
                    self._prefill_tokens += job.length + job.generated
                    depths[i] = 0
            if self._is_padded and 2 * len(self._behind) > drafting:  # the remaining sequences wait for them
                depths = [0] * len(jobs)
        return depths

    def skip(self, jobs: Sequence[SimulatedRequest]) -> list[int]:
        """A step without a decision, in which nothing drafts."""
        self._behind, self._prefill_tokens = {}, 0
        return [0] * len(jobs)

    def round_of(self, depths: Sequence[int], rounds: Rounds, drafting: int, prompt_rows: int = 0) -> SimulatedRound:
        """A round with these depths; `tokens` and `variance` are those of the deepest."""
        batch, deepest, rows = len(depths), max(depths), len(depths) + sum(depths)
        if self._is_padded:
            rows = (batch if prompt_rows else padded_size(batch)) * (1 + deepest)
            drafting = padded_size(drafting)
        full = rounds.at_depth(batch, deepest, drafting)
        waiting = full.waiting + self._prefill_seconds
        return replace(full, seconds=waiting + rounds.pass_seconds(rows), rows=rows, waiting=waiting)

    def observe(
        self,
        jobs: Sequence[SimulatedRequest],
        depths: Sequence[int],
        accepted: Sequence[int],
        context: int,
        step: SimulatedRound,
        prompt_rows: int,
        rounds: Rounds,
    ) -> None:
        """Report a step that the policy decided."""
        if not depths:
            return
        network = rounds.network_seconds if step.depth else 0.0
        drafting: tuple[DraftingObservation, ...] = ()
        if step.depth or self._behind:
            deepest, prefill = max(step.depth, *self._behind.values(), 0), self._prefill_seconds
            own = step.waiting - network - prefill
            drafting = (DraftingObservation(METHOD, deepest, own, self._prefill_tokens, prefill),)
        self._policy.observe(
            StepObservation(
                batch=len(jobs),
                rows=step.rows,
                prefill_rows=prompt_rows,
                drafting=drafting,
                verify_seconds=rounds.pass_seconds(step.rows, prompt_rows) + self._context_seconds * context,
                network_seconds=network,
                rounds=tuple(self._rounds(jobs, depths, accepted)),
                is_timed=not self._behind,
                context=context,
                slots=padded_size(len(jobs)) if self._is_padded else None,
            )
        )

    @property
    def _prefill_seconds(self) -> float:
        return self._row_seconds * self._prefill_tokens

    def _rounds(
        self, jobs: Sequence[SimulatedRequest], depths: Sequence[int], accepted: Sequence[int]
    ) -> Iterator[RoundObservation]:
        for job, depth, more in zip(jobs, depths, accepted, strict=True):
            if depth:
                yield RoundObservation(job.id, TRAFFIC, depth, more, depth)
            elif granted := self._behind.get(job.id):
                yield RoundObservation(job.id, TRAFFIC, 0, 0, granted, is_behind=True)

    def _candidate(self, job: SimulatedRequest) -> DepthCandidate:
        remaining = job.left - job.generated
        tokens = job.length + job.generated
        return DepthCandidate(job.id, TRAFFIC, min(self._max_depth, remaining), tokens, remaining, job.length)
