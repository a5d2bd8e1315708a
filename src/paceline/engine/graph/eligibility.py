"""Whether the next step can run as a graph, and if not, why."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from paceline.core.sequence import Sequence
from paceline.engine import Scheduler, Speculator
from paceline.engine.graph.drafter import GraphProposer
from paceline.engine.graph.slot_params import fits_slot
from paceline.engine.step.step import HostReason
from paceline.requests import RequestValidator

STEPS_BETWEEN_ADMISSIONS = 2
"""Most graph steps between two admissions by the host executor, unless the waiting prompts fill half a pass. Leaving the graph,
taking a step on the host and entering again takes as long as a few steps, and in a large batch some sequence ends in nearly
every step."""
SMALL_BATCH = 16
"""Sequences for each step that an admission waits: a small batch admits at once."""


HOST_REJECTION = 4
"""Most sequences that verify drafts by rejection on the host, if no other sequence runs. In larger batches, and next to
sequences of another kind, they decode in graphs without drafts: the host would slow down all by more than the drafts gain."""


class GraphEligibility:
    def __init__(
        self,
        proposer: GraphProposer | None,
        scheduler: Scheduler,
        speculator: Speculator,
        validator: RequestValidator,
    ) -> None:
        self._proposer = proposer
        self._scheduler, self._speculator, self._validator = scheduler, speculator, validator
        self._eligible: set[int] = set()
        self._flags: tuple[object, ...] = ()
        self.num_steps = 0
        """Graph steps since the host's last step."""

    def reason(self, sequences: Iterable[Sequence]) -> HostReason | None:
        """Why the host executor has to decode one of these sequences. None if the device can sample and draft for all."""
        flags = self._speculator.enabled, self._validator.flags
        if flags != self._flags:
            self._flags, self._eligible = flags, set()
        eligible = self._eligible
        for sequence in sequences:
            if sequence.id in eligible:
                continue
            if not self._can_sample(sequence):
                return HostReason.SAMPLING
            if not self._can_draft(sequence):
                return HostReason.PROPOSER
            eligible.add(sequence.id)
        running = self._scheduler.running
        if 0 < len(running) <= HOST_REJECTION and all(map(self._would_reject, running)):
            return HostReason.SAMPLING
        return None

    def skip_rejection(self, sequences: Iterable[Sequence]) -> None:
        """Sequences under rejection draft nothing in graph steps."""
        for sequence in sequences:
            if sequence.verification != "coupled" and not sequence.sampling.is_greedy:
                sequence.depth = 0

    def _would_reject(self, sequence: Sequence) -> bool:
        """Whether it verifies drafts by rejection in steps of the host."""
        is_rejection = sequence.verification != "coupled" and not sequence.sampling.is_greedy
        return is_rejection and self._speculator.enabled and self._validator.max_depth(sequence) > 0

    def can_continue(self, running: Seq[Sequence]) -> bool:
        """Whether the graph executor takes over again after one step of the host that completes all prompts."""
        if not 0 < self._scheduler.prompt_rows() <= self._scheduler.max_batched_tokens - len(running):
            return False
        return self.reason(sequence for sequence in running if sequence.num_uncomputed == 1) is None

    def admits(self) -> bool:
        """Whether the host executor should admit waiting sequences now."""
        scheduler = self._scheduler
        if not scheduler.may_admit:
            return False
        wait = min(STEPS_BETWEEN_ADMISSIONS, len(scheduler.running) // SMALL_BATCH)
        return self.num_steps >= wait or 2 * scheduler.prompt_rows() >= scheduler.max_batched_tokens

    def forget(self) -> None:
        """Forget which sequences are eligible."""
        self._eligible.clear()

    def _can_sample(self, sequence: Sequence) -> bool:
        """Whether the device can pick its tokens."""
        params = sequence.sampling
        return (
            params.constraint is None
            and not sequence.needs_prompt_scores
            and fits_slot(params, self._validator.limits.vocab_size)
            and len(sequence.ids) >= 2
            and sequence.draft is None
        )

    def draft_on_host(self, sequences: Iterable[Sequence]) -> bool:
        """Whether one of these sequences is to draft now, by a proposer that cannot run inside the graph."""
        proposers = self._speculator.proposers
        return any(sequence.depth and proposers[sequence.method] is not self._proposer for sequence in sequences)

    def _can_draft(self, sequence: Sequence) -> bool:
        """Whether its proposer drafts inside the graph, it wants no drafts, or it can decode here until it is to draft."""
        proposer = self._speculator.proposers[sequence.method]
        if self._proposer is proposer or proposer.traits.can_miss_steps:
            return True
        return not self._speculator.enabled or self._validator.max_depth(sequence) == 0
