"""Records every step of an engine: what it drafted and accepted, what it read from memory, and where its time went."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.clock import Clock
from paceline.engine import EngineParts, StepHook
from paceline.tools.footprint import draft_parts, kv_bytes_per_token, weight_reads
from paceline.tools.profile.measurement import RoundTimes

if TYPE_CHECKING:
    from paceline.core.sequence import Sequence
    from paceline.engine.step.step import Schedule, StepResult
    from paceline.models.decoder import ForwardOutput
    from paceline.requests import Grammar
    from paceline.speculation.drafts import Draft


@dataclass(frozen=True, slots=True)
class Outcome:
    """One sequence that the step drafted for. `levels` is the longest path of the draft, `nodes` its tokens."""

    requested: int
    levels: int
    nodes: int
    accepted: int


@dataclass(frozen=True, slots=True)
class RecordedRound:
    label: str
    times: RoundTimes
    batch: int
    """Sequences that decoded."""
    rows: int
    """Rows of the target's pass that decode or verify."""
    prefill_rows: int
    outcomes: tuple[Outcome, ...]

    @property
    def is_decode(self) -> bool:
        return self.batch > 0 and self.prefill_rows == 0

    @property
    def requested(self) -> int:
        """Depth of the deepest requested draft. 0 for a plain step."""
        return max((outcome.requested for outcome in self.outcomes), default=0)


@dataclass(slots=True)
class _Step:
    label: str
    started: float
    committed: float
    result: "StepResult"
    bytes_read: int
    draft: float
    """Seconds of drafting: in the graph, or of proposing and of informing the proposers."""


class Recorder(StepHook):
    """Give it to `LLM(hooks=[recorder])`; it keeps nothing while `label` is None.

    A step lasts until the next step begins, or until the engine has no sequence left. Graph steps are timed by the device. The
    recorder waits for a pass of the host, which costs a little.
    """

    def __init__(self, clock: Clock) -> None:
        self.label: str | None = None
        self.rounds: list[RecordedRound] = []
        self._clock = clock
        self._engine: EngineParts | None = None
        self._started = 0.0
        self._num_sequences = 0
        self._step: _Step | None = None

    def attach(self, engine: EngineParts) -> None:
        self._engine = engine

    def sequence_added(self, sequence: "Sequence", grammar: "Grammar | None") -> None:
        self._num_sequences += 1

    def sequence_finished(self, sequence: "Sequence") -> None:
        self._num_sequences -= 1

    def before_step(self) -> None:
        now = self._clock.now()
        self._close(now)
        self._started = now

    def after_pass(self, schedule: "Schedule", drafts: "Mapping[int, Draft]", output: "ForwardOutput") -> None:
        engine = self._engine
        assert engine is not None
        if engine.runner.device.type == "cuda":
            import torch

            torch.cuda.synchronize(engine.runner.device)

    def verified(self, result: "StepResult") -> None:
        if self.label is None:
            return
        draft = result.draft_seconds if result.draft_seconds is not None else result.times.drafted - result.times.began
        self._step = _Step(self.label, self._started, 0.0, result, self._bytes(result), draft)

    def committed(self, result: "StepResult") -> None:
        if self._step is not None:
            self._step.committed = self._clock.now()

    def after_step(self) -> None:
        now, step = self._clock.now(), self._step
        if step is not None and step.result.draft_seconds is None:
            step.draft += now - step.committed
        if not self._num_sequences:
            self._close(now)

    def _bytes(self, result: "StepResult") -> int:
        """Bytes that a step reads. It reads the target's matrices and every context once, and a draft's matrices and its
        contexts once a level. A draft prefill is not counted."""
        engine = self._engine
        assert engine is not None
        contexts = [row.sequence.num_computed + row.num_tokens + row.num_nodes for row in result.sequences]
        tokens = sum(map(engine.runner.model.config.attended, contexts))
        total = weight_reads(engine.runner.model) + tokens * kv_bytes_per_token(engine.runner)
        for method in {row.sequence.method for row in result.sequences if row.levels}:
            drafted = [row for row in result.sequences if row.levels and row.sequence.method == method]
            parts, levels = draft_parts(engine, [method]), max(row.levels for row in drafted)
            total += levels * sum(weight_reads(model) for model in (*(r.model for r in parts.runners), *parts.heads))
            # Level i reads the committed tokens and the i drafted before it
            read = sum(row.levels * len(row.sequence.ids) + row.levels * (row.levels - 1) // 2 for row in drafted)
            total += read * sum(map(kv_bytes_per_token, parts.runners))
        return total

    def _close(self, now: float) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        result, total = step.result, now - step.started
        times = RoundTimes(
            draft=step.draft,
            verify=result.forward_seconds,
            sample=result.verify_seconds - result.forward_seconds,
            gap=total - step.draft - result.verify_seconds,
            total=total,
            bytes_read=step.bytes_read,
        )
        batch = sum(row.verdict is not None for row in result.sequences)
        outcomes = tuple(
            Outcome(row.num_reserved, row.levels, row.num_nodes, row.accepted)
            for row in result.sequences
            if row.num_reserved
        )
        self.rounds.append(RecordedRound(step.label, times, batch, result.rows, result.num_tokens - batch, outcomes))
