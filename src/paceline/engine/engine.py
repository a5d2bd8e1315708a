"""The loop: schedule -> propose -> verify -> commit."""

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import InvalidRequest
from paceline.core.kv_events import CacheEvent
from paceline.core.output import StepOutput, StepTimes
from paceline.core.request import Request
from paceline.core.sequence import FinishReason, Sequence
from paceline.core.speculation import SpeculationFlags
from paceline.engine.hidden import committed_hidden
from paceline.engine.memory_fit import MemoryFit
from paceline.engine.output import Scribe
from paceline.engine.scheduler import Schedule, Scheduler
from paceline.engine.spans import path_moves, span_of
from paceline.engine.speculator import Speculator
from paceline.engine.stats.snapshot import AuditCounts, EngineSnapshot, TrafficReport
from paceline.engine.validator import Intake
from paceline.models.architectures.output import ForwardOutput
from paceline.models.runner import ModelRunner
from paceline.models.tokenizer.tokenizer import Tokenizer
from paceline.speculation.drafts import Draft
from paceline.speculation.proposer import HiddenRequest
from paceline.speculation.verification.verify import Round, Verdict, verify

if TYPE_CHECKING:
    from paceline.engine.executors.graph.executor import RunAhead
    from paceline.engine.hooks.exports import Exports
    from paceline.engine.hooks.hook import Witness
    from paceline.engine.hooks.imports import Imports
    from paceline.engine.hooks.self_audit import SelfAudit

logger = logging.getLogger(__name__)

NO_DRAFT = Draft()
FETCH_SECONDS = 0.005
"""How long to wait where blocks of the only sequences are on their way: somebody else may come."""
REPORT_SECONDS = 0.25
"""How old a busy engine's word on its traffic may get."""


class Engine:
    """Generates for many sequences at once. Not thread-safe: one thread calls `add`, `cancel` and `step`.

    Everything is decided by a part: who runs (scheduler), what is guessed and how deep (speculator), what is true
    (verification). Plain decoding is the same loop with empty drafts.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        speculator: Speculator,
        intake: Intake,
        tokenizer: Tokenizer | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.speculator = speculator
        self.intake = intake
        self.tokenizer = tokenizer
        self.clock = clock or WallClock()
        self.ahead: RunAhead | None = None
        """Where there is a GPU: rounds that need nothing from the host."""
        self.imports: Imports | None = None
        """Where prompts may be computed elsewhere and handed over."""
        self.exports: Exports | None = None
        """Where prompts are computed for others."""
        self.witness: Witness | None = None
        """Hears of every sequence and round: an audit."""
        self.audit: SelfAudit | None = None
        """What checks finished texts in idle moments."""
        self.memory: MemoryFit | None = None
        """What was computed before anything was loaded into it; None for an engine put together by hand."""
        self.num_steps = 0
        """Steps begun: an engine with work whose count stands still is stuck."""
        self._sequences: dict[str, list[Sequence]] = {}
        self._scribes: dict[int, Scribe] = {}
        self._traffic: tuple[TrafficReport, ...] = ()
        self._reported = 0.0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def rehearse(self) -> None:
        """Compile ahead what traffic will want, where there is a GPU and nobody is being served. It takes a minute the first
        time on a machine, seconds later."""
        if self.ahead is None or self.has_work:
            return
        began = self.clock.now()
        self.ahead.rehearse()
        logger.info("rounds rehearsed in %.1f s", self.clock.now() - began)

    def step(self) -> list[StepOutput]:
        """One pass of the target over everything that is ready."""
        self.num_steps += 1
        if self.audit is not None:
            self.audit.pause()
        if self.ahead is not None and (outputs := self.ahead.step()) is not None:
            self._report(self.clock.now())
            return outputs
        plan = self._schedule()
        if not plan.items:
            return []
        began = self.clock.now()
        _seat(plan, began)
        drafts = self.speculator.propose(plan)
        drafted = self.clock.now()
        wanted = self.speculator.wanted(plan)
        output, verdicts = self._verify(plan, drafts, wanted)
        verified = self.clock.now()
        if self.scheduler.tiers is not None:
            self.scheduler.tiers.computed(plan.num_tokens, verified - drafted, bool(verdicts))
        hidden = committed_hidden(plan, drafts, verdicts, output, wanted)
        outputs = self._commit(plan, drafts, verdicts, output.logits, StepTimes(began, drafted, verified))
        self.speculator.learn(plan, drafts, verdicts, verified - drafted)
        self.speculator.look_ahead(self.scheduler.running, verdicts, hidden, has_room=not self.scheduler.is_full)
        self._report(drafted)
        return outputs

    def _schedule(self) -> Schedule:
        """Who takes part, and with how many rows. Where nobody can, since blocks are on their way, wait a moment for them."""
        plan = self.scheduler.schedule()
        self.speculator.forget(plan.preempted)
        if not plan.items:
            if self.scheduler.tiers is not None:
                self.scheduler.tiers.wait(FETCH_SECONDS)
        elif self.imports is not None:
            self.imports.admitted(plan)
        return plan

    def _verify(
        self, plan: Schedule, drafts: Mapping[int, Draft], wanted: Mapping[str, HiddenRequest]
    ) -> tuple[ForwardOutput, dict[int, Verdict]]:
        """One forward pass over all rows, and what it says about the draft of each sequence that got its logits."""
        tables = self.scheduler.tables
        spans = [
            span_of(item, drafts.get(item.sequence.id, NO_DRAFT), tables.blocks(item.sequence.id))
            for item in plan.items
        ]
        layers = {layer for wants in wanted.values() for layer in wants.layers}
        if self.exports is not None:
            layers |= self.exports.layers(plan)
            self.exports.before(plan)
        output = self.runner.forward(spans, tuple(sorted(layers)), any(wants.last for wants in wanted.values()))
        if self.exports is not None:
            self.exports.after(plan, drafts, output)
        if output.logits is None:
            return output, {}
        rounds = self._rounds(plan, drafts)  # while a GPU computes
        return output, dict(zip(rounds, verify(output.logits, list(rounds.values())), strict=True))

    def _rounds(self, plan: Schedule, drafts: Mapping[int, Draft]) -> dict[int, Round]:
        """What is to be verified, of each sequence that gets its logits."""
        rounds = {}
        for item in plan.items:
            sequence = item.sequence
            if item.completes:
                draft = drafts.get(sequence.id, NO_DRAFT)
                masks = self._scribes[sequence.id].masks(draft)
                rounds[sequence.id] = Round.of(sequence, draft, sequence.verification, masks)
        return rounds

    def _commit(
        self,
        plan: Schedule,
        drafts: Mapping[int, Draft],
        verdicts: Mapping[int, Verdict],
        logits: Tensor | None,
        times: StepTimes,
    ) -> list[StepOutput]:
        """Append what was verified, roll the cache back to it, and say what is new."""
        outputs, row = [], 0
        self.runner.move(*path_moves(plan, verdicts, self.scheduler.tables))
        for item in plan.items:
            sequence, verdict = item.sequence, verdicts.get(item.sequence.id)
            sequence.num_computed += item.num_tokens
            if verdict is not None:
                assert logits is not None
                draft = drafts.get(sequence.id, NO_DRAFT)
                first, row = row, row + 1 + len(draft)
                is_read = self.witness is not None or sequence.sampling.logprobs is not None
                rows = logits[first:row] if is_read else None
                sequence.num_computed += len(verdict.path)
                if self.witness is not None:
                    assert rows is not None
                    self.witness.saw(sequence, draft, verdict, rows)
                self.scheduler.tables.shrink(sequence.id, sequence.num_computed)
                room = self.intake.remaining(sequence)
                outputs.append(self._scribes[sequence.id].append(verdict, len(draft), room, rows, times))
            self._settle(sequence)
        return outputs

    def commit_round(self, verdicts: Seq[tuple[Sequence, Verdict, int]]) -> list[StepOutput]:
        """Append what a round ahead has verified, of each sequence so many drafts; `num_computed` says how much of it is in
        the cache."""
        assert self.ahead is not None
        assert self.ahead.last_landed is not None
        times, outputs = self.ahead.last_landed.times(self.clock.now()), []
        for sequence, verdict, num_drafted in verdicts:
            room = self.intake.remaining(sequence)
            outputs.append(self._scribes[sequence.id].append(verdict, num_drafted, room, times=times))
            self._settle(sequence)
        return outputs

    def _settle(self, sequence: Sequence) -> None:
        """Offer its full blocks to others, even if it ended: the next turn of a conversation starts with them."""
        self.scheduler.tables.publish(sequence.id, sequence.ids, min(sequence.num_computed, len(sequence.ids)))
        if sequence.finish_reason is not None:
            self._finish(sequence)

    def validate(self, request: Request) -> None:
        """Raise `InvalidRequest` if `add` would. Safe from any thread."""
        self.intake.validate(request)

    def add(self, request: Request) -> None:
        """Queue a request; its tokens come out of `step`."""
        grammar = self.intake.validate(request)
        if request.id in self._sequences:
            raise InvalidRequest(f"a request with id {request.id!r} is already running", field="id")
        sequences = self.intake.sequences(request, self.clock.now())
        scribes = {sequence.id: Scribe(sequence, self.tokenizer, grammar) for sequence in sequences}
        self._sequences[request.id] = sequences
        self._scribes.update(scribes)
        for sequence in sequences:
            self.scheduler.add(sequence)
            if self.witness is not None:
                self.witness.begin(sequence, grammar)

    def cancel(self, request_id: str) -> None:
        """Free everything the request holds, now. Cancelling what is finished or unknown is no error."""
        for sequence in self._sequences.pop(request_id, []):
            if not sequence.is_finished:
                sequence.finish_reason = FinishReason.CANCELLED
                self._finish(sequence)
        if self.imports is not None:
            self.imports.forget(request_id)

    @property
    def has_idle_work(self) -> bool:
        """Whether there is something to do that may wait until nobody is being served."""
        tiers = self.scheduler.tiers
        return (tiers is not None and tiers.has_unsaved) or (self.audit is not None and self.audit.has_work)

    def use_idle_time(self) -> None:
        """Do a little of it."""
        if self.scheduler.tiers is not None:
            self.scheduler.tiers.rest(FETCH_SECONDS)
        if self.audit is not None:
            self.audit.advance()

    def close(self) -> None:
        """End what runs outside this process, and save what of the cache survives a restart. The engine generates no more;
        safe to call twice."""
        try:
            if self.scheduler.tiers is not None:
                self.scheduler.tiers.close()
        finally:
            self.runner.close()

    def listen(self, listener: Callable[[CacheEvent], None]) -> None:
        """Tell `listener` what is cached from now on, in which tier, and no longer. It must not wait."""
        if self.scheduler.tiers is None:
            self.scheduler.tables.pool.listener = listener
        else:
            self.scheduler.tiers.listen(listener)

    def validate_flags(self, flags: SpeculationFlags) -> None:
        """Raise `InvalidRequest` if `set_flags` would. Safe from any thread."""
        self.intake.validate_flags(flags)

    def set_flags(self, flags: SpeculationFlags) -> None:
        """Change how to speculate from the next step on. Nothing is drained: running sequences go on under the new flags."""
        self.validate_flags(flags)
        self.intake.flags = flags
        self.speculator.switch(flags.enabled)
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            method = self.intake.method(sequence.speculation)
            if method != sequence.method:
                self.speculator.move(sequence, method)
        self.speculator.look_ahead(self.scheduler.running)

    def snapshot(self) -> EngineSnapshot:
        """Safe from any thread, and waits for nothing: counts as of now, traffic as last written down by `step`."""
        pool = self.scheduler.tables.pool
        return EngineSnapshot(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_used=pool.num_blocks - pool.num_free,
            kv_total=pool.num_blocks,
            preemptions=self.scheduler.num_preemptions,
            invalid_drafts=self.speculator.num_invalid,
            flags=SpeculationFlags(self.speculator.enabled, self.intake.offered_method, self.intake.offered_depth),
            traffic=self._traffic,
            tiers=None if self.scheduler.tiers is None else self.scheduler.tiers.report(),
            advantage=self.speculator.depth.advantage if self.speculator.enabled else None,
            seconds=self.speculator.totals.seconds,
            audit=AuditCounts() if self.audit is None else self.audit.counts,
        )

    def _report(self, now: float) -> None:
        if now - self._reported >= REPORT_SECONDS or not self.has_work:
            self._traffic, self._reported = self.speculator.traffic.report(), now

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.speculator.forget((sequence,))
        del self._scribes[sequence.id]
        if self.witness is not None:
            self.witness.finished(sequence)
        if all(sibling.is_finished for sibling in self._sequences.get(sequence.request_id, ())):
            self._sequences.pop(sequence.request_id, None)


def _seat(plan: Schedule, now: float) -> None:
    for item in plan.items:
        if item.sequence.started is None:
            item.sequence.started = now
