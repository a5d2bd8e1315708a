"""Trains a draft further on samples, with the trainer of `paceline train`, and scores it and its parent on the same samples.

It leaves the machine to the server: lowest priority, few threads, and pauses between steps.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast, get_args

import torch
from torch import Tensor

from paceline.core.clock import Clock
from paceline.core.errors import InvalidConfig
from paceline.gateway.sessions import LearningSample
from paceline.models.loading import open_checkpoint
from paceline.tools.progress import Stopped, StopRequest, TrainingLog
from paceline.tools.train.card import make_record, write_card
from paceline.tools.train.evaluate import Evaluation, Score
from paceline.tools.train.plan import Kind, LearnPlan, TrainPlan
from paceline.tools.train.run import CHECKPOINT, make_draft, pick_device
from paceline.tools.train.saved_draft import load_draft, save_draft
from paceline.tools.train.target import Target, identity
from paceline.tools.train.text_files import Text, TextFile, TextPlan
from paceline.tools.train.trainer import CurvePoint, LearningRate, Trainer

Samples = Sequence[LearningSample]

SOURCE = "samples of live traffic"
WARMUP_SHARE = 0.2
"""Share of the steps in which the learning rate grows."""
NICENESS = 19


def lower_priority(threads: int) -> None:
    """The lowest priority for this process, and `threads` threads of torch."""
    os.nice(max(0, NICENESS - os.nice(0)))
    torch.set_num_threads(threads)


class Pacer:
    """Called after every step, it pauses so that steps take at most `share` of the time."""

    def __init__(self, share: float, clock: Clock, pause: Callable[[float], None]) -> None:
        self._share, self._clock, self._pause = share, clock, pause
        self._last = clock.now()

    def start(self) -> None:
        self._last = self._clock.now()

    def __call__(self) -> None:
        busy = self._clock.now() - self._last
        if self._share < 1.0 and busy > 0:
            self._pause(busy * (1.0 / self._share - 1.0))
        self._last = self._clock.now()


@dataclass(frozen=True, slots=True)
class LearnedDraft:
    """A trained version, and the scores of its parent and itself on the same held-out samples."""

    before: tuple[Score, ...]
    """Scores of the parent by row."""
    after: tuple[Score, ...]
    tokens: int
    """Output tokens that it was trained on."""
    seconds: float


class FurtherTraining(Protocol):
    """Trains a version."""

    def run(
        self, parent: Path, samples: Samples, held_out: Samples, out: Path, stop: StopRequest
    ) -> LearnedDraft | None:
        """Writes the version and its card into `out`. Returns None if `stop` was requested."""
        ...


class DraftTraining:
    """Implements `FurtherTraining`. It holds the target's weights on the learner's device."""

    def __init__(self, plan: LearnPlan, command: str, clock: Clock, progress: TrainingLog, pacer: Pacer) -> None:
        self._plan, self._command, self._clock, self._progress, self._pacer = plan, command, clock, progress, pacer
        checkpoint = open_checkpoint(plan.model)
        device = pick_device(plan.device)
        self._target = Target(checkpoint, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        self._target.check_length(plan.length)
        self._identity = identity(self._target.name, checkpoint.read_tokenizer())
        self._num_runs = 0

    def run(
        self, parent: Path, samples: Samples, held_out: Samples, out: Path, stop: StopRequest
    ) -> LearnedDraft | None:
        try:
            return self._run(parent, samples, held_out, out, stop)
        except Stopped:
            return None

    def score(self, draft: Path, samples: Samples) -> Evaluation:
        """The scores of a saved draft by row."""
        trainer = self._trainer(draft, draft, samples, samples, LearningRate(steps=1))
        return trainer.evaluate(trainer.held_out)

    def _run(
        self, parent: Path, samples: Samples, held_out: Samples, out: Path, stop: StopRequest
    ) -> LearnedDraft | None:
        plan = self._plan
        count = len(to_text(samples, plan.length, self._target.config.vocab_size))
        steps = max(1, math.ceil(plan.epochs * count / plan.rows))
        schedule = LearningRate(plan.learning_rate, steps, warmup=max(1, round(WARMUP_SHARE * steps)))
        self._num_runs += 1
        trainer = self._trainer(parent, out, samples, held_out, schedule)
        with stop.interruptible():
            before = trainer.evaluate(trainer.held_out)
        self._pacer.start()
        trainer.run(lambda status: self._show(steps, status.step, status.loss), stop)
        if not trainer.is_done or stop():
            return None
        save_draft(out, trainer.draft, trainer.vocabulary, self._target, self._identity)
        trainer.draft = load_draft(out).draft.to(self._target.device)  # as saved: bfloat16, scales folded in
        with stop.interruptible():
            after = trainer.evaluate(trainer.held_out)
        trainer.curve = [_point(0, 0.0, before), _point(trainer.tokens, trainer.seconds, after)]
        text_plan = TextPlan(self._target.name, self._identity["vocabulary"], plan.length, (SOURCE,), plan.seed)
        text = TextFile(text_plan, trainer.text, trainer.held_out, 0, 0.0)
        kinds = categories(held_out, plan.length, self._target.config.vocab_size)
        record = make_record(trainer, self._train_plan(parent, out), text, _grouped(after, kinds), None, self._command)
        write_card(out, record, self._progress)
        (out / CHECKPOINT).unlink(missing_ok=True)
        rows = trainer.held_out.kinds
        return LearnedDraft(
            tuple(before.chain.get(row, Score()) for row in rows),
            tuple(after.chain.get(row, Score()) for row in rows),
            tokens=num_trained(trainer.text),
            seconds=trainer.seconds,
        )

    def _trainer(self, parent: Path, out: Path, samples: Samples, held_out: Samples, schedule: LearningRate) -> Trainer:
        plan = self._plan
        text, held = (to_text(group, plan.length, self._target.config.vocab_size) for group in (samples, held_out))
        draft, vocabulary = make_draft(self._train_plan(parent, out), self._target, self._identity, text.ids)
        return Trainer(
            draft,
            self._target,
            vocabulary,
            text,
            held,
            schedule,
            rows=min(plan.rows, len(text)),
            seed=plan.seed + self._num_runs,
            checkpoint=out / CHECKPOINT,
            clock=self._clock,
            points=0,
            is_fresh=False,
        )

    def _train_plan(self, parent: Path, out: Path) -> TrainPlan:
        kind = load_draft(parent).draft.kind
        if kind not in get_args(Kind):
            raise InvalidConfig(f"{parent} is a draft of kind {kind!r}, which cannot learn")
        return TrainPlan(
            kind=cast(Kind, kind), out=out, model=self._plan.model, start=parent, length=self._plan.length, steps=1
        )

    def _show(self, steps: int, step: int, loss: float) -> None:
        self._progress.show(step / steps, f"step {step} of {steps}, loss {loss:.3f}")
        self._pacer()


def _point(tokens: int, seconds: float, found: Evaluation) -> CurvePoint:
    chain, tree = found.chain_overall, found.tree_overall
    return CurvePoint(tokens, round(seconds, 1), chain.alphas, chain.tokens_per_round, tree.tokens_per_round)


def _grouped(evaluation: Evaluation, kinds: Sequence[str]) -> Evaluation:
    """Scores by row as scores by category."""
    chain, tree = dict[str, Score](), dict[str, Score]()
    for row, kind in enumerate(kinds):
        if f"{row}" in evaluation.chain:
            chain[kind] = chain.get(kind, Score()) + evaluation.chain[f"{row}"]
            tree[kind] = tree.get(kind, Score()) + evaluation.tree[f"{row}"]
    return Evaluation(chain, tree, evaluation.nodes)


def to_text(samples: Sequence[LearningSample], length: int, vocab_size: int) -> Text:
    """One row a sample, padded at the end, so that a token has the context that it had. A sample of more than `length` tokens
    gives several rows that end with its output. A draft learns to predict outputs only. Kinds are row numbers, so that the
    scores of an evaluation are those of single rows."""
    rows = [window for sample in samples for window in windows(sample, length) if max(window[0]) < vocab_size]
    size = max((len(ids) for ids, _ in rows), default=1)
    ids, answer = torch.zeros(len(rows), size, dtype=torch.int32), torch.zeros(len(rows), size, dtype=torch.bool)
    for row, (tokens, start) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        answer[row, start : len(tokens)] = True
    return Text(ids, answer, tuple(f"{row}" for row in range(len(rows))), answer)


def categories(samples: Sequence[LearningSample], length: int, vocab_size: int) -> list[str]:
    """The category of every row of `to_text`."""
    return [sample.category for sample in samples for window in windows(sample, length) if max(window[0]) < vocab_size]


def windows(sample: LearningSample, length: int) -> list[tuple[tuple[int, ...], int]]:
    """(token ids, index of the first output token) of every row of a sample. The oldest output comes first."""
    ids, prompt = (*sample.prompt, *sample.output), len(sample.prompt)
    found = []
    end = len(ids)
    while end > prompt:
        start = max(0, end - length)
        found.append((ids[start:end], max(1, prompt - start)))
        end = start
    return found[::-1]


def num_trained(text: Text) -> int:
    trained: Tensor = text.answer if text.trained is None else text.trained
    return int(trained.sum())
