"""Gives requests that name no method the one that `DefaultMethod` chooses, and measures the steps of each method for it."""

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from paceline.core.clock import Clock
from paceline.core.sequence import Sequence
from paceline.engine import DefaultMethod, Scheduler, StepHook
from paceline.engine.step.step import StepResult
from paceline.requests import Grammar, RequestValidator
from paceline.speculation import Proposer

logger = logging.getLogger(__name__)


class DefaultMethodTrial(StepHook):
    """A sequence gets its method in the first step after it was added and keeps it, unless a flag names another."""

    def __init__(
        self,
        methods: Seq[str],
        proposers: Mapping[str, Proposer],
        scheduler: Scheduler,
        validator: RequestValidator,
        clock: Clock,
    ) -> None:
        """`methods` are the methods to choose from. The first is used until all are measured."""
        self.default = DefaultMethod(methods)
        self._proposers, self._scheduler, self._validator, self._clock = proposers, scheduler, validator, clock
        self._added: list[Sequence] = []
        self._last_ids: frozenset[int] = frozenset()
        """Sequences of the step before, which ended at `_last_end`."""
        self._last_end = 0.0

    @property
    def default_method(self) -> str:
        """The method of a sequence that starts now."""
        return self.default.method

    def method_of(self, sequence: Sequence) -> str:
        """The method of a sequence under the present flags."""
        named = self._validator.named_method(sequence.speculation)
        return named or (sequence.method if sequence.method in self.default.methods else self.default.method)

    def sequence_added(self, sequence: Sequence, grammar: Grammar | None) -> None:
        if sequence.speculation.enabled and sequence.draft is None:
            self._added.append(sequence)

    def before_step(self) -> None:
        if not self._added:
            return
        added, self._added = self._added, []
        added = [
            sequence
            for sequence in added
            if not (sequence.is_finished or self._validator.named_method(sequence.speculation))
        ]
        if not added:
            return
        scheduler, before = self._scheduler, self.default.method
        load = min(scheduler.max_num_seqs, len(scheduler.running) + len(scheduler.waiting))
        method = self.default.assign(len(added), load, [name for name in self.default.methods if self._can_draft(name)])
        for sequence in added:
            sequence.method = method
        if self.default.method != before:
            rates = [(name, self.default.goodput(name, load)) for name in self.default.methods]
            logger.info(
                "requests that name no method now use %s: %s tokens per second of a sequence at a load of %d",
                self.default.method,
                ", ".join(f"{name} {'unknown' if rate is None else format(rate, '.1f')}" for name, rate in rates),
                load,
            )

    def committed(self, result: StepResult) -> None:
        now, ids = self._clock.now(), frozenset([sequence_result.sequence.id for sequence_result in result.sequences])
        is_continued, seconds = not ids.isdisjoint(self._last_ids), now - self._last_end  # else the engine was idle
        self._last_ids, self._last_end = ids, now
        methods = {
            sequence_result.sequence.method if sequence_result.sequence.speculation.enabled else ""
            for sequence_result in result.sequences
        }
        if not (is_continued and result.is_timed and len(methods) == 1):
            return
        (method,) = methods
        if any(
            sequence_result.verdict is None
            or sequence_result.num_tokens > 1
            or sequence_result.sequence.draft is not None
            for sequence_result in result.sequences
        ):
            return
        if method in self.default.methods and self._can_draft(method):
            tokens = sum([sequence_result.accepted + 1 for sequence_result in result.sequences])
            self.default.observe(method, len(result.sequences), tokens, seconds)

    def _can_draft(self, method: str) -> bool:
        is_available = self._proposers[method].traits.is_available
        return is_available is None or is_available()
