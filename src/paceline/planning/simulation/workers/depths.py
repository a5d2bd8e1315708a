"""The production depth policy in the simulation: its decisions, and the observations that it learns from."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.planning.profiles.profile import WorkerProfile
from paceline.planning.simulation.workers.job import Job
from paceline.planning.simulation.workers.rounds import Round, Rounds
from paceline.speculation.depth.goodput import GoodputDepth
from paceline.speculation.depth.policy import Candidate, DraftingObservation, RoundObservation, StepObservation

METHOD, CATEGORY = "draft_model", "draft_model/simulated"


class PolicyDepths:
    """`goodput` of one worker. It starts from the pass times of the profile, as a worker does after its warm-up."""

    def __init__(self, profile: WorkerProfile, max_depth: int) -> None:
        self._max_depth = max_depth
        self._policy = GoodputDepth(max_depth)
        self._policy.calibrate(dict(profile.pass_seconds.points), profile.context_seconds.value)
        self._context_seconds = profile.context_seconds.value

    def decide(self, jobs: Sequence[Job]) -> list[int]:
        if self._policy.skip_step(len(jobs)):
            return [0] * len(jobs)
        return self._policy.decide([self._candidate(job) for job in jobs])

    def round_of(self, depths: Sequence[int], rounds: Rounds, drafting: int) -> Round:
        """A round with these depths; `tokens` and `variance` are those of the deepest."""
        full, rows = rounds.at_depth(len(depths), max(depths), drafting), len(depths) + sum(depths)
        return replace(full, seconds=full.waiting + rounds.pass_seconds(rows), rows=rows)

    def observe(
        self,
        jobs: Sequence[Job],
        depths: Sequence[int],
        accepted: Sequence[int],
        context: int,
        step: Round,
        prompt_rows: int,
        rounds: Rounds,
    ) -> None:
        """Report a step that the policy decided."""
        if not depths:
            return
        network = rounds.network_seconds if step.depth else 0.0
        drafted = zip(jobs, depths, accepted, strict=True)
        self._policy.observe(
            StepObservation(
                batch=len(jobs),
                rows=step.rows,
                prefill_rows=prompt_rows,
                drafting=(DraftingObservation(METHOD, step.depth, step.waiting - network),) if step.depth else (),
                verify_seconds=rounds.pass_seconds(step.rows, prompt_rows) + self._context_seconds * context,
                network_seconds=network,
                rounds=tuple(
                    RoundObservation(job.id, CATEGORY, depth, more, depth) for job, depth, more in drafted if depth
                ),
                context=context,
            )
        )

    def _candidate(self, job: Job) -> Candidate:
        remaining = job.left - job.generated
        return Candidate(job.id, CATEGORY, min(self._max_depth, remaining), job.length + job.generated, remaining)
