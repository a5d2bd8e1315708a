"""Prefill workers in the simulation: the production policy decides which prompts they compute, and links send the blocks."""

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.planning import WorkerProfile
from paceline.planning.simulator.job import SimulatedRequest
from paceline.planning.simulator.worker import SimulatedWorker
from paceline.policy.routing.handoff import HandoffPolicy, LocalPrompt, PrefillLoad

BLOCK_TOKENS = 16
"""Tokens of a KV block: a hand-off sends full blocks."""


@dataclass(slots=True, eq=False)
class SimulatedPrompt:
    """A prompt that a prefill worker computes for a target worker."""

    job: SimulatedRequest
    """The request at its target."""
    part: SimulatedRequest
    """The same prompt at the prefill worker."""
    worker: int
    requested: float
    deadline: float
    tokens: int
    """Tokens until the prompt is computed, with those queued before it."""
    uncached: int


class SimulatedHandoffs:
    """Hand-offs of all target workers. Times are seconds of the virtual clock."""

    def __init__(self, profile: WorkerProfile, clock: Clock, link: str) -> None:
        self._clock = clock
        self._round_trip = profile.round_trip_seconds.value
        self._bytes_per_token = profile.kv_bytes_per_token.value
        self._link = profile.links[link].value
        self.network_factor = 1.0
        self.workers: dict[int, SimulatedWorker] = {}
        """Usable prefill workers by number."""
        self._policies: dict[int, HandoffPolicy] = {}
        self._pending: dict[int, SimulatedPrompt] = {}
        """The prompts in hand-off, by the id of the request."""
        self._link_free: dict[int, float] = {}
        """Time at which the link of a prefill worker is free."""
        self.num_done = self.num_failed = 0

    def choose(self, job: SimulatedRequest, target: SimulatedWorker) -> SimulatedPrompt | None:
        """Chooses a prefill worker for the prompt. None if the target computes the prompt itself."""
        if not self.workers or job.moves:
            return None
        now = self._clock.now()
        uncached = job.length - min(target.cache.held(job.prompt), job.length - 1)
        local = LocalPrompt(uncached, target.queued_tokens, target.batch.count, job.length)
        trip = self._round_trip * self.network_factor
        loads = [PrefillLoad(_name(n), worker.queued_tokens, trip) for n, worker in self.workers.items()]
        chosen = self._policy(job.worker).choose(local, loads, now)
        if chosen is None:
            return None
        number = int(chosen.worker.removeprefix("prefill-"))
        part = SimulatedRequest(job.id, now, job.length, 1, job.prompt, number)
        tokens = uncached + self.workers[number].queued_tokens
        prompt = SimulatedPrompt(job, part, number, now, now + chosen.timeout, tokens, uncached)
        self._pending[job.id] = prompt
        return prompt

    def measure_local(self, job: SimulatedRequest, queued: int, since: float) -> Callable[[], None]:
        """Reports the time to the first token of a prompt that the target computes, when called."""
        policy, tokens = self._policy(job.worker), queued + job.length - job.cached
        return lambda: policy.add_local(tokens, self._clock.now() - since, self._clock.now())

    def sent(self, job_id: int) -> float | None:
        """Called when the prompt is computed. Returns the time at which its last block arrives, None if the prompt is no longer
        wanted."""
        prompt = self._pending.get(job_id)
        if prompt is None:
            return None
        now, size = self._clock.now(), prompt.uncached * self._bytes_per_token
        # Blocks are sent while later ones are computed
        begun = max(prompt.requested, self._link_free.get(prompt.worker, 0.0))
        end = max(now, begun + size / self._link * self.network_factor)
        self._link_free[prompt.worker] = end
        return end + 2.0 * self._round_trip * self.network_factor

    def finish(self, job_id: int) -> SimulatedRequest | None:
        """Called when the blocks have arrived. Returns the request for its target, None if it is no longer wanted."""
        prompt = self._pending.pop(job_id, None)
        if prompt is None:
            return None
        policy, now = self._policy(prompt.job.worker), self._clock.now()
        policy.add_handoff(_name(prompt.worker), prompt.tokens, now - prompt.requested, now)
        job = prompt.job
        job.cached = min(job.length - prompt.uncached, job.length - 1)
        job.received = (job.length - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        self.num_done += 1
        return job

    def fail(self, job_id: int) -> SimulatedRequest | None:
        """Called when the hand-off failed or is late. Returns the request, whose prompt its target computes. None if the
        hand-off has ended already."""
        prompt = self._pending.pop(job_id, None)
        if prompt is None:
            return None
        self._policy(prompt.job.worker).add_failure(_name(prompt.worker), self._clock.now())
        self.num_failed += 1
        return prompt.job

    def of_target(self, target: int) -> list[SimulatedRequest]:
        """Forget the prompts in hand-off for a target that is lost; they need another one."""
        moved = [job_id for job_id, prompt in self._pending.items() if prompt.job.worker == target]
        return [self._pending.pop(job_id).job for job_id in moved]

    def of_worker(self, worker: int) -> list[int]:
        """Requests whose prompts a prefill worker computes or sends."""
        return [job_id for job_id, prompt in self._pending.items() if prompt.worker == worker]

    def _policy(self, target: int) -> HandoffPolicy:
        policy = self._policies.get(target)
        if policy is None:
            policy = self._policies[target] = HandoffPolicy()
        return policy


def _name(worker: int) -> str:
    return f"prefill-{worker}"
