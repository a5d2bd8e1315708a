"""Steps whose passes the host launches: any batch, any proposer, any device.

`HostExecutor` runs these steps. The functions before it prepare and read a pass: its rows from a schedule and its drafts, the
rules by which the pass picks tokens itself without returning its logits, the hidden states of committed tokens for proposers
that draft from them, and the cache moves for accepted tree paths.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from paceline.core.clock import Clock
from paceline.core.output import StepTimes
from paceline.core.sequence import BLOCK_SIZE
from paceline.engine.hook import AfterLayer, StepHooks
from paceline.engine.output import OutputProcessor
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculator import Speculator
from paceline.engine.step.step import (
    NO_DRAFT,
    Schedule,
    Scheduled,
    SequenceResult,
    StepDrafts,
    StepResult,
    needs_logits,
)
from paceline.kernels.cpu.decoder import Sampler
from paceline.kv import BlockTables
from paceline.models.decoder import ForwardOutput, HiddenStates
from paceline.models.runner import ModelRunner, Span
from paceline.speculation import HiddenRequest, HiddenRows
from paceline.speculation.drafts import Draft, depths
from paceline.speculation.rows import Purpose, stream
from paceline.speculation.verification import Round, Verdict, ancestors, verify, verify_picks


def committed_hidden(
    plan: Schedule,
    drafts: Mapping[int, Draft],
    verdicts: Mapping[int, Verdict],
    output: ForwardOutput,
    wanted: Mapping[str, HiddenRequest],
) -> dict[int, HiddenRows]:
    """By sequence id, for sequences whose method is in `wanted`. Call it before commit: the rows of a sequence start at
    `num_computed`."""
    if not wanted:
        return {}
    rows: list[int] = []
    owners: list[tuple[int, str, int, slice]] = []  # sequence, method, first position, its part of `rows`
    first = 0
    for item in plan.items:
        sequence, draft, verdict = item.sequence, drafts.get(item.sequence.id), verdicts.get(item.sequence.id)
        if sequence.method in wanted and sequence.speculation.enabled:
            begin = len(rows)
            rows.extend(range(first, first + item.num_tokens))
            if verdict is not None:
                rows.extend(first + item.num_tokens + node for node in verdict.path)
            owners.append((sequence.id, sequence.method, sequence.num_computed, slice(begin, len(rows))))
        first += item.num_tokens + (len(draft) if draft else 0)
    if isinstance(output.hidden_by_layer, HiddenStates) and output.last_hidden is None:
        return {i: HiddenRows(start, output.hidden_by_layer.choose(rows[part]), None) for i, _, start, part in owners}
    return _states_of(owners, rows, output, wanted)


@torch.inference_mode()
def _states_of(
    owners: Seq[tuple[int, str, int, slice]],
    rows: list[int],
    output: ForwardOutput,
    wanted: Mapping[str, HiddenRequest],
) -> dict[int, HiddenRows]:
    layers = {layer for wants in wanted.values() for layer in wants.layers}
    inner = {layer: _take(output.hidden_by_layer[layer], rows) for layer in layers}
    last = None if output.last_hidden is None else _take(output.last_hidden, rows)
    return {
        sequence_id: HiddenRows(
            start,
            {layer: inner[layer][part] for layer in wanted[method].layers},
            last[part] if last is not None and wanted[method].last else None,
        )
        for sequence_id, method, start, part in owners
    }


def _take(states: Tensor, rows: list[int]) -> Tensor:
    """states[rows]: a copy on a GPU, where a pass may reuse the memory of its outputs."""
    if states.is_cpu and rows and rows[-1] - rows[0] == len(rows) - 1:  # they increase
        return states[rows[0] : rows[-1] + 1]
    return states[torch.tensor(rows, dtype=torch.int64, device=states.device)]


def samplers_of(schedule: Schedule, output: OutputProcessor) -> list[Sampler] | None:
    """The sampler of each item. None if a sequence needs its logits."""
    samplers = []
    for item in schedule.items:
        sequence = item.sequence
        if needs_logits(sequence) or output.has_grammar(sequence):
            return None
        samplers.append(Sampler(sequence.sampling, stream(Purpose.SHARED, sequence.seed, sequence.choice)))
    return samplers


def span_of(item: Scheduled, draft: Draft, blocks: Seq[int]) -> Span:
    """The committed tokens of the item, then its draft; logits of the newest token and of every node."""
    sequence, start = item.sequence, item.sequence.num_computed
    positions = visible = None
    if draft.tokens and not draft.is_chain:
        # Row 0 is the last committed token, row 1 + i node i: drafts are only made for a sequence that decodes.
        positions = [start, *(start + depth for depth in depths(draft.parents))]
        visible = ancestors(draft.parents)
    return Span(
        blocks=blocks,
        context_len=start,
        tokens=[*sequence.ids[start : start + item.num_tokens], *draft.tokens],
        num_logits=1 + len(draft) if item.completes else 0,
        positions=positions,
        ancestors=visible,
    )


def path_moves(plan: Schedule, verdicts: Mapping[int, Verdict], tables: BlockTables) -> tuple[list[int], list[int]]:
    """Source and target cache positions that make accepted tree paths contiguous; chains already are. Call it before commit:
    the rows of a sequence start at `num_computed`."""
    sources: list[int] = []
    targets: list[int] = []
    for item in plan.items:
        verdict = verdicts.get(item.sequence.id)
        if verdict is None:
            continue
        blocks = tables.blocks(item.sequence.id)
        first = item.sequence.num_computed + item.num_tokens
        for place, node in enumerate(verdict.path):
            if node != place:
                sources.append(_slot(blocks, first + node))
                targets.append(_slot(blocks, first + place))
    return sources, targets


def _slot(blocks: Seq[int], index: int) -> int:
    return blocks[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE


PROMPT_ROWS = 256
"""Prompt tokens whose logits are computed together, for requests with `prompt_logprobs`."""


@dataclass(frozen=True, slots=True, eq=False)
class HostDrafts(StepDrafts):
    """The drafts of a host step."""

    by_sequence: Mapping[int, Draft]


@dataclass(frozen=True, slots=True, eq=False)
class _Submitted:
    schedule: Schedule
    drafts: Mapping[int, Draft]
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

    def propose(self, schedule: Schedule) -> HostDrafts:
        self._began = self._clock.now()
        return HostDrafts(self._speculator.propose(schedule))

    def submit(self, schedule: Schedule, drafts: StepDrafts) -> None:
        assert isinstance(drafts, HostDrafts)
        drafted, by_sequence = self._clock.now(), drafts.by_sequence
        wanted, tables = self._speculator.hidden_requests(schedule), self._scheduler.tables
        spans = [
            span_of(item, by_sequence.get(item.sequence.id, NO_DRAFT), tables.blocks(item.sequence.id))
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
            hook.after_pass(schedule, by_sequence, output)
        seconds = self._clock.now() - drafted
        decodes = after_layer is None and all(item.num_tokens == 1 for item in schedule.items)
        padded = self._runner.padded_shape(spans) if decodes else None
        self._submitted = _Submitted(schedule, by_sequence, wanted, output, padded, self._began, drafted, seconds)

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
        hooks_need_logits = any(hook.needs_logits for hook in self._hooks)
        for item in step.schedule.items:
            sequence, verdict = item.sequence, verdicts.get(item.sequence.id)
            if verdict is None:
                results.append(SequenceResult(sequence, item.num_tokens, None))
                continue
            draft = step.drafts.get(sequence.id, NO_DRAFT)
            first, row = row, row + 1 + len(draft)
            rows: Tensor | None = None
            if hooks_need_logits or sequence.sampling.logprobs is not None:
                assert logits is not None
                rows = logits[first:row]
            levels = max(depths(draft.parents)) if draft else 0
            results.append(
                SequenceResult(sequence, item.num_tokens, verdict, item.num_draft, len(draft), levels, draft, rows)
            )
        return results
