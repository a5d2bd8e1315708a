"""Steps whose passes the host launches: any batch, any proposer, any device."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from paceline.core.clock import Clock
from paceline.core.output import StepTimes
from paceline.engine.executors.executor import NO_DRAFT, SequenceResult, StepResult
from paceline.engine.executors.hidden import committed_hidden
from paceline.engine.executors.samplers import samplers_of
from paceline.engine.executors.spans import path_moves, span_of
from paceline.engine.hooks.hook import AfterLayer, StepHooks
from paceline.engine.output import OutputProcessor
from paceline.engine.schedule import Schedule
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculator import Speculator
from paceline.models.architectures.decoder import ForwardOutput
from paceline.models.runner import ModelRunner
from paceline.speculation.drafts import Draft, depths
from paceline.speculation.proposer import HiddenRequest
from paceline.speculation.verification.verify import Round, Verdict, verify, verify_picks

PROMPT_ROWS = 256
"""Prompt tokens whose logits are computed together, for requests with `prompt_logprobs`."""
Drafts = Mapping[int, Draft]
"""Drafts by sequence id."""


@dataclass(frozen=True, slots=True, eq=False)
class _Submitted:
    schedule: Schedule
    drafts: Drafts
    wanted: Mapping[str, HiddenRequest]
    output: ForwardOutput
    padded: tuple[int, int] | None
    """Sequences and rows of a padded pass in which every sequence decodes."""
    began: float
    drafted: float
    forward_seconds: float


class HostExecutor:
    """One pass of the target for each step; `collect` always returns the step just submitted."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        speculator: Speculator,
        output: OutputProcessor,
        clock: Clock,
        hooks: StepHooks,
    ) -> None:
        self._runner, self._scheduler, self._speculator = runner, scheduler, speculator
        self._output, self._clock, self._hooks = output, clock, hooks
        self._began = 0.0
        self._submitted: _Submitted | None = None

    def propose(self, schedule: Schedule) -> Drafts:
        self._began = self._clock.now()
        return self._speculator.propose(schedule)

    def submit(self, schedule: Schedule, drafts: Drafts) -> None:
        drafted = self._clock.now()
        wanted, tables = self._speculator.hidden_requests(schedule), self._scheduler.tables
        spans = [
            span_of(item, drafts.get(item.sequence.id, NO_DRAFT), tables.blocks(item.sequence.id))
            for item in schedule.items
        ]
        layers = {layer for wants in wanted.values() for layer in wants.layers}
        layers.update(chain.from_iterable(hook.hidden_layers(schedule) for hook in self._hooks))
        last = any(wants.last for wants in wanted.values()) or any(
            item.sequence.needs_prompt_scores for item in schedule.items
        )
        after_layer = self._before_pass(schedule)
        samplers = None
        if not last and after_layer is None and self._can_pick:
            samplers = samplers_of(schedule, self._output)
        output = self._runner.forward(spans, tuple(sorted(layers)), last, after_layer, samplers)
        for hook in self._hooks:
            hook.after_pass(schedule, drafts, output)
        seconds = self._clock.now() - drafted
        decodes = after_layer is None and all(item.num_tokens == 1 for item in schedule.items)
        padded = self._runner.padded_shape(spans) if decodes else None
        self._submitted = _Submitted(schedule, drafts, wanted, output, padded, self._began, drafted, seconds)

    def collect(self) -> StepResult | None:
        if self._submitted is None:
            return None
        step, self._submitted = self._submitted, None
        verdicts = self._verify(step)
        self._score_prompts(step)
        verified = self._clock.now()
        hidden = committed_hidden(step.schedule, step.drafts, verdicts, step.output, step.wanted)
        sources, targets = path_moves(step.schedule, verdicts, self._scheduler.tables)
        if sources:
            self._runner.move(sources, targets)
        decoding = [item.sequence for item in step.schedule.items if item.sequence.id in verdicts]
        slots, rows = step.padded or (None, len(verdicts) + sum(len(draft) for draft in step.drafts.values()))
        return StepResult(
            sequences=self._results(step, verdicts),
            times=StepTimes(step.began, step.drafted, verified),
            forward_seconds=step.forward_seconds,
            verify_seconds=verified - step.drafted,
            rows=rows,
            slots=slots,
            context=sum(len(sequence.ids) for sequence in decoding),
            hidden=hidden,
        )

    def prepare_next(self, result: StepResult) -> None:
        prompt_rows = self._scheduler.prompt_rows()
        self._speculator.prepare_next(
            self._scheduler.running,
            {
                sequence_result.sequence.id: sequence_result.verdict
                for sequence_result in result.sequences
                if sequence_result.verdict is not None
            },
            result.hidden,
            has_room=not self._scheduler.is_full(prompt_rows),
            prompt_rows=prompt_rows,
        )

    @property
    def _can_pick(self) -> bool:
        """Whether passes may pick tokens without returning logits."""
        return self._runner.can_pick and not any(hook.needs_logits for hook in self._hooks)

    def _before_pass(self, schedule: Schedule) -> AfterLayer | None:
        callbacks = [callback for hook in self._hooks if (callback := hook.before_pass(schedule)) is not None]
        if len(callbacks) < 2:
            return callbacks[0] if callbacks else None

        def after_layer(layer: int) -> None:
            for callback in callbacks:
                callback(layer)

        return after_layer

    def _verify(self, step: _Submitted) -> dict[int, Verdict]:
        """Verdicts by sequence, for the sequences whose newest token has its logits."""
        if step.output.sampled_tokens is not None:
            ids = [item.sequence.id for item in step.schedule.items if item.completes]
            drafts = [step.drafts.get(i, NO_DRAFT) for i in ids]
            return dict(zip(ids, verify_picks(step.output.sampled_tokens, drafts), strict=True))
        if step.output.logits is None:
            return {}
        rounds: dict[int, Round] = {}  # prepared while a GPU computes
        for item in step.schedule.items:
            sequence = item.sequence
            if item.completes:
                draft = step.drafts.get(sequence.id, NO_DRAFT)
                masks = self._output.masks(sequence, draft)
                rounds[sequence.id] = Round.of(sequence, draft, sequence.verification, masks)
        return dict(zip(rounds, verify(step.output.logits, list(rounds.values())), strict=True))

    def _score_prompts(self, step: _Submitted) -> None:
        """Log-probabilities of prompt tokens for requests that want them, a few rows at a time: a row of logits is large."""
        row, states = 0, step.output.last_hidden
        for item in step.schedule.items:
            sequence = item.sequence
            if sequence.needs_prompt_scores:
                assert states is not None
                start, end = (
                    sequence.num_computed,
                    min(sequence.num_computed + item.num_tokens, sequence.num_prompt - 1),
                )
                for first in range(start, end, PROMPT_ROWS):
                    rows = slice(row + first - start, row + min(first + PROMPT_ROWS, end) - start)
                    self._output.add_prompt_logits(sequence, first, self._runner.logits(states[rows]))
            row += item.num_tokens + len(step.drafts.get(sequence.id, NO_DRAFT))

    def _results(self, step: _Submitted, verdicts: Mapping[int, Verdict]) -> list[SequenceResult]:
        results, row, logits = [], 0, step.output.logits
        needs_logits = any(hook.needs_logits for hook in self._hooks)
        for item in step.schedule.items:
            sequence, verdict = item.sequence, verdicts.get(item.sequence.id)
            if verdict is None:
                results.append(SequenceResult(sequence, item.num_tokens, None))
                continue
            draft = step.drafts.get(sequence.id, NO_DRAFT)
            first, row = row, row + 1 + len(draft)
            rows: Tensor | None = None
            if needs_logits or sequence.sampling.logprobs is not None:
                assert logits is not None
                rows = logits[first:row]
            levels = max(depths(draft.parents)) if draft else 0
            results.append(
                SequenceResult(sequence, item.num_tokens, verdict, item.num_draft, len(draft), levels, draft, rows)
            )
        return results
