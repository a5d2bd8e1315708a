"""Whose turn the next step is: the device's, ahead of the host, or the host's."""

from collections.abc import Sequence as Seq

from paceline.core.sequence import Sequence
from paceline.engine.executors.graph.drafter import DeviceProposer
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculator import Speculator
from paceline.engine.validator import Intake

ROUNDS_BETWEEN = 2
"""Rounds that go by before somebody else is let in, unless that is worth a step of its own. To come home, take a step on the
host and leave again takes as long as a few rounds, and where many sequences run one of them ends in nearly every round."""


class DeviceTurns:
    def __init__(
        self, proposer: DeviceProposer | None, scheduler: Scheduler, speculator: Speculator, intake: Intake
    ) -> None:
        self._proposer = proposer
        self._scheduler, self._speculator, self._intake = scheduler, speculator, intake
        self._eligible: dict[int, bool] = {}
        self.rounds = 0
        """Since the host's last step."""

    def is_devices(self, running: Seq[Sequence]) -> bool:
        """Nothing to do but decode, nobody to let in now, and only sequences whose picks the device can make."""
        if self._lets_in():
            return False
        return all(len(s.ids) - s.num_computed == 1 and self._is_eligible(s) for s in running)

    def goes_on(self, running: Seq[Sequence]) -> bool:
        """Whether it is the device's again after a step of the host's that is for prompts, and ends them all."""
        if not 0 < self._scheduler.prompt_rows <= self._scheduler.max_batched_tokens - len(running):
            return False
        return all(self._is_eligible(sequence) for sequence in running if sequence.num_uncomputed == 1)

    def forget(self) -> None:
        """What is known of sequences: they may be others next time."""
        self._eligible.clear()

    def _lets_in(self) -> bool:
        """Whether it is time for somebody who waits."""
        scheduler = self._scheduler
        if not scheduler.may_admit:
            return False
        return self.rounds >= ROUNDS_BETWEEN or 2 * scheduler.prompt_rows >= scheduler.max_batched_tokens

    def _is_eligible(self, sequence: Sequence) -> bool:
        """Whether the device can pick its tokens: what it cannot do is what depends on text or on other tokens."""
        known = self._eligible.get(sequence.id)
        if known is None:
            params = sequence.sampling
            known = self._eligible[sequence.id] = (
                (sequence.verification == "coupled" or params.is_greedy)
                and not (params.has_penalties or params.logit_bias or params.json_schema or params.logprobs is not None)
                and len(sequence.ids) >= 2
            )
        # Drafts are made on the device, or nobody wants any
        is_drafted = self._proposer is self._speculator.proposers[sequence.method]
        return known and (is_drafted or not self._speculator.enabled or self._intake.max_depth(sequence) == 0)
