"""Listens in on an engine: what every step drafted, accepted, read from memory, and where its time went."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from paceline.bench.profiling.memory_reads import draft_parts, kv_bytes_per_token, pass_bytes, weight_reads
from paceline.bench.profiling.profile import RoundTimes
from paceline.core.clock import Clock

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.engine.scheduler import Schedule
    from paceline.engine.speculator import SpeculatedRound
    from paceline.models.runner import ModelRunner, Span
    from paceline.speculation.drafts import Draft
    from paceline.speculation.verification.verify import Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """One sequence that was asked for drafts. `levels` is the longest path of the draft, `nodes` its tokens."""

    asked: int
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
    """Target rows of those, drafts included."""
    prefill_rows: int
    outcomes: tuple[Outcome, ...]

    @property
    def is_decode(self) -> bool:
        return self.batch > 0 and self.prefill_rows == 0

    @property
    def asked(self) -> int:
        """The deepest draft asked for; 0: a plain step."""
        return max((outcome.asked for outcome in self.outcomes), default=0)


@dataclass(slots=True)
class _Step:
    label: str | None
    started: float
    draft: float = 0.0
    forward: float = 0.0
    verify: float = 0.0
    bytes_read: int = 0
    facts: tuple[int, int, int, tuple[Outcome, ...]] | None = None


class Recorder:
    """`with Recorder(engine, clock) as recorder:` around an idle engine; nothing is kept while `label` is None.

    A round lasts until the next begins, or until the engine runs dry. Rounds that run ahead on a GPU are timed by its events;
    a pass that the host asks for is waited for, which costs a little.
    """

    def __init__(self, engine: "Engine", clock: Clock) -> None:
        self.label: str | None = None
        self.rounds: list[RecordedRound] = []
        self._engine = engine
        self._clock = clock
        self._stack = ExitStack()
        self._step: _Step | None = None
        self._drafting = False

    def __enter__(self) -> "Recorder":
        engine, replace = self._engine, self._replace
        replace(engine, "step", self._timed_step(engine.step))
        replace(engine.speculator, "learn", self._learning(engine.speculator.learn))
        replace(engine.speculator, "record", self._landing(engine.speculator.record))
        replace(engine.runner, "forward", self._target_pass(engine.runner.forward))
        parts = draft_parts(engine)
        for runner in parts.runners:
            replace(runner, "forward", self._draft_pass(runner, runner.forward))
        for head in parts.heads:
            replace(head, "logits", self._head_pass(head, head.logits))
        for proposer in engine.speculator.proposers.values():
            for name in ("observe", "collect"):
                replace(proposer, name, self._drafted(getattr(proposer, name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _replace(self, thing: object, name: str, value: Callable[..., Any]) -> None:
        if name in vars(thing):
            self._stack.callback(setattr, thing, name, vars(thing)[name])
        else:  # the new one hides the class's own until it is taken away
            self._stack.callback(delattr, thing, name)
        setattr(thing, name, value)

    def _timed_step(self, step: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> Any:
            now = self._clock.now()
            self._close(now)
            self._step = _Step(self.label, now)
            outputs = step()
            if not self._engine.has_work:
                self._close(self._clock.now())
            return outputs

        return timed

    def _learning(self, learn: Callable[..., None]) -> Callable[..., None]:
        def learning(
            plan: "Schedule",
            drafts: "Mapping[int, Draft]",
            verdicts: "Mapping[int, Verdict]",
            verify_seconds: float,
            *rest: Any,
        ) -> None:
            if self._step is not None:
                self._step.verify = verify_seconds
                self._step.facts = _facts(plan, drafts, verdicts)
            learn(plan, drafts, verdicts, verify_seconds, *rest)

        return learning

    def _landing(self, record: Callable[..., None]) -> Callable[..., None]:
        """A round that the device did alone, timed by its own events."""

        def landing(rounds: "Sequence[SpeculatedRound]", **figures: Any) -> None:
            ahead, step = self._engine.ahead, self._step
            if step is not None and ahead is not None and ahead.last_landed is not None:
                landed = ahead.last_landed
                step.draft, step.forward = landed.draft_seconds, landed.verify_seconds
                step.verify = landed.verify_seconds + landed.sample_seconds
                outcomes = tuple(Outcome(r.asked, r.drafted, r.num_nodes or r.drafted, r.accepted) for r in rounds)
                step.facts = figures["batch"], figures["rows"], 0, outcomes
                step.bytes_read = self._round_bytes(rounds)
            record(rounds, **figures)

        return landing

    def _round_bytes(self, rounds: "Sequence[SpeculatedRound]") -> int:
        """The target's matrices and the contexts once, a draft's matrices once a level."""
        engine = self._engine
        tokens = sum(len(sequence.ids) for sequence in engine.scheduler.running)
        total = weight_reads(engine.runner.model) + tokens * kv_bytes_per_token(engine.runner)
        levels = max((round_.drafted for round_ in rounds), default=0)
        if levels:
            parts = draft_parts(engine, {round_.sequence.method for round_ in rounds})
            models = (*(runner.model for runner in parts.runners), *parts.heads)
            total += levels * sum(weight_reads(model) for model in models)
        return total

    def _drafted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def drafted(*arguments: Any) -> Any:
            if self._drafting or self._step is None:  # one proposer may ask others: count the outermost
                return work(*arguments)
            self._drafting, before = True, self._clock.now()
            try:
                return work(*arguments)
            finally:
                self._drafting = False
                self._step.draft += self._clock.now() - before

        return drafted

    def _target_pass(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        runner = self._engine.runner

        def timed(spans: "Sequence[Span]", *rest: Any, **options: Any) -> Any:
            before = self._clock.now()
            output = forward(spans, *rest, **options)
            _wait_for(runner)
            if self._step is not None:
                self._step.bytes_read += pass_bytes(runner, spans)
                if not self._drafting:  # a draft may use the target's own layers
                    self._step.forward += self._clock.now() - before
            return output

        return timed

    def _draft_pass(self, runner: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        def counted(spans: "Sequence[Span]", *rest: Any, **options: Any) -> Any:
            if self._step is not None:
                self._step.bytes_read += pass_bytes(runner, spans)
            return forward(spans, *rest, **options)

        return counted

    def _head_pass(self, head: Any, logits: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            if self._step is not None:
                self._step.bytes_read += weight_reads(head)
            return logits(*arguments)

        return counted

    def _close(self, now: float) -> None:
        step, self._step = self._step, None
        if step is None or step.label is None or step.facts is None:
            return
        total = now - step.started
        times = RoundTimes(
            draft=step.draft,
            verify=step.forward,
            sample=step.verify - step.forward,
            gap=total - step.draft - step.verify,
            total=total,
            bytes_read=step.bytes_read,
        )
        self.rounds.append(RecordedRound(step.label, times, *step.facts))


def _facts(
    plan: "Schedule", drafts: "Mapping[int, Draft]", verdicts: "Mapping[int, Verdict]"
) -> tuple[int, int, int, tuple[Outcome, ...]]:
    from paceline.speculation.trees.tree import depths

    outcomes = []
    for item in plan.items:
        if item.num_draft:
            draft = drafts.get(item.sequence.id)
            levels = max(depths(draft.parents)) if draft else 0
            accepted = len(verdicts[item.sequence.id].path)
            outcomes.append(Outcome(item.num_draft, levels, len(draft) if draft else 0, accepted))
    rows = len(verdicts) + sum(len(draft) for draft in drafts.values())
    prefill = sum(item.num_tokens for item in plan.items) - len(verdicts)
    return len(verdicts), rows, prefill, tuple(outcomes)


def _wait_for(runner: "ModelRunner") -> None:
    if runner.device.type == "cuda":
        import torch

        torch.cuda.synchronize(runner.device)
