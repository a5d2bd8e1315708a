"""The training loop, with checkpoints to resume from."""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.clock import Clock
from paceline.core.errors import InvalidConfig, PacelineError
from paceline.train.data.state_cache import StateCache
from paceline.train.data.text_file import Text
from paceline.train.drafts.draft import Draft
from paceline.train.drafts.target import Target
from paceline.train.drafts.vocabulary import DraftVocabulary
from paceline.train.evaluate import Evaluation, evaluate
from paceline.train.loss import compute_loss
from paceline.train.optimizer import DraftOptimizer, LearningRate
from paceline.train.progress import Stopped, StopRequest

REPORT_EVERY = 20
"""Steps between progress reports on a GPU: each report waits for the GPU."""
SAVE_SECONDS = 30.0
MAX_POINTS = 12
"""Evaluations during a training."""


class Diverged(PacelineError):
    """The loss is not finite."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point of the card's training curve."""

    tokens: int
    seconds: float
    alphas: tuple[float, ...]
    tokens_per_round: float
    tree_tokens_per_round: float


@dataclass(frozen=True, slots=True)
class TrainStatus:
    """A progress report."""

    done: float
    step: int
    tokens: int
    loss: float
    agreement: tuple[float, ...]
    point: CurvePoint | None


class Trainer:
    """Trains `draft` in place on `text`.

    `run` can be stopped at any time. A trainer with the same arguments and checkpoint file resumes; with a schedule of steps it
    ends with the same weights.
    """

    def __init__(
        self,
        draft: Draft,
        target: Target,
        vocabulary: DraftVocabulary,
        text: Text,
        held_out: Text,
        schedule: LearningRate,
        *,
        rows: int,
        seed: int,
        checkpoint: Path,
        clock: Clock,
        points: int = MAX_POINTS,
        compiled: bool = False,
        is_fresh: bool = True,
    ) -> None:
        """`is_fresh` says that the draft is untrained, so that the first batch sets its scales. `points` is the largest number
        of evaluations during the training. With 0 the draft is not evaluated at the end either."""
        if not len(text):
            raise InvalidConfig("there is no text to train on: give --text-tokens or --text-minutes")
        self.draft, self.target, self.vocabulary = draft.to(target.device), target, vocabulary
        self.text, self.held_out, self.schedule, self.rows, self.seed = text, held_out, schedule, rows, seed
        self.step, self.tokens, self.curve = 0, 0, list[CurvePoint]()
        self._checkpoint, self._clock, self._points, self._compiled = checkpoint, clock, points, compiled
        self._is_fresh, self._is_evaluated = is_fresh, points > 0
        self._states = StateCache(target, text.ids.to(target.device), draft.state_layers)
        self._head = vocabulary.head(target.head)
        self._optimizer = DraftOptimizer(draft)
        self._earlier_seconds = 0.0  # of runs before a resume
        self._step_seconds = 0.0
        self._is_out_of_time = False
        self._order: tuple[int, Tensor] | None = None

    def run(self, on_progress: Callable[[TrainStatus], None], stop: StopRequest | None = None) -> None:
        """Train to the end of the schedule, or until `stop`, which drops the current step. Then save."""
        stop = stop or StopRequest()
        self._resume()
        started = saved = self._clock.now()
        every = REPORT_EVERY if self.target.device.type == "cuda" else 1
        self.draft.train()
        while self.schedule.done(self.step, seconds := self._earlier_seconds + self._clock.now() - started) < 1:
            if self._ends_late(seconds):
                self._is_out_of_time = True
                break
            point = None
            try:
                if int(self.schedule.done(self.step, seconds) * self._points) > len(self.curve):
                    with stop.interruptible():
                        point = self._evaluate(seconds)
                loss, agreement = self._train_step(seconds, stop)
            except Stopped:
                break
            done = self.schedule.done(self.step, seconds)
            self._step_seconds = self._earlier_seconds + self._clock.now() - started - seconds
            if point is not None or self.step == 1 or self.step % every == 0:
                on_progress(TrainStatus(done, self.step, self.tokens, _finite(loss), tuple(agreement.tolist()), point))
            if self._clock.now() - saved >= SAVE_SECONDS:
                self.save(self._earlier_seconds + self._clock.now() - started)
                saved = self._clock.now()
        self._earlier_seconds += self._clock.now() - started
        if self.is_done and self._is_evaluated:
            with suppress(Stopped), stop.interruptible():
                self._evaluate(self._earlier_seconds)
        self.save(self._earlier_seconds)

    @property
    def is_done(self) -> bool:
        return self._is_out_of_time or self.schedule.done(self.step, self._earlier_seconds) >= 1

    @property
    def seconds(self) -> float:
        return self._earlier_seconds

    def set_time(self, seconds: float, points: int) -> None:
        """Limit the training, earlier runs included, to this time and this number of evaluations. Call it before `run`."""
        self.schedule = replace(self.schedule, seconds=seconds)
        self._points = points

    def evaluate(self, text: Text) -> Evaluation:
        return evaluate(self.draft, self.target, self.vocabulary, text)

    def batch(self, step: int) -> Tensor:
        """[rows] int64, row numbers of the text. Every epoch has its own order. Step and seed determine the batch."""
        chosen = []
        for place in range(step * self.rows, (step + 1) * self.rows):
            epoch, index = divmod(place, len(self.text))
            if self._order is None or self._order[0] != epoch:
                shuffle = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                self._order = epoch, torch.randperm(len(self.text), generator=shuffle)
            chosen.append(self._order[1][index])
        return torch.stack(chosen)

    def _ends_late(self, seconds: float) -> bool:
        """Whether the next step would end after the time of the schedule."""
        limit = self.schedule.seconds
        return limit is not None and self.step > 0 and seconds + self._step_seconds > limit

    def _train_step(self, seconds: float, stop: StopRequest) -> tuple[Tensor, Tensor]:
        with stop.interruptible():  # weights change after it
            rows = self.batch(self.step)
            states = self._states.of(rows)
            trained = None if self.text.trained is None else self.text.trained[rows].to(self.target.device)
            if self.step == 0:
                self.draft.calibrate(self.target, states) if self._is_fresh else self.draft.recalibrate(states)
            half = self.target.dtype == torch.bfloat16
            with torch.autocast(self.target.device.type, torch.bfloat16, enabled=half):
                loss = compute_loss(
                    self.draft, self.target, self._head, self.vocabulary, states, self._compiled, trained
                )
            loss.total.backward()
        self._optimizer.step(self.schedule.rate(self.step, seconds))
        self.step += 1
        self.tokens += states.ids.numel()
        return loss.total.detach(), loss.agreement

    def _evaluate(self, seconds: float) -> CurvePoint:
        found = self.evaluate(self.held_out)
        chain, tree = found.chain_overall, found.tree_overall
        point = CurvePoint(self.tokens, round(seconds, 1), chain.alphas, chain.tokens_per_round, tree.tokens_per_round)
        self.curve.append(point)
        return point

    def save(self, seconds: float) -> None:
        content = {
            "draft": self.draft.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "vocabulary": self.vocabulary.ids,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": seconds,
            "rows": self.rows,
            "curve": [asdict(point) for point in self.curve],
        }
        part = self._checkpoint.with_name(self._checkpoint.name + ".part")
        torch.save(content, part)
        os.replace(part, self._checkpoint)

    def _resume(self) -> None:
        if not self._checkpoint.exists():
            return
        content: dict[str, Any] = torch.load(self._checkpoint, map_location=self.target.device, weights_only=True)
        if content["rows"] != self.rows or not _same(content["vocabulary"], self.vocabulary.ids):
            raise self._mismatch()
        try:
            self.draft.load_state_dict(content["draft"])
            self._optimizer.load_state_dict(content["optimizer"])
        except (RuntimeError, ValueError) as error:  # another kind or shape
            raise self._mismatch() from error
        self.step, self.tokens, self._earlier_seconds = content["step"], content["tokens"], content["seconds"]
        self.curve = [CurvePoint(**point | {"alphas": tuple(point["alphas"])}) for point in content["curve"]]

    def _mismatch(self) -> InvalidConfig:
        return InvalidConfig(f"{self._checkpoint} belongs to another training: delete it, or give another folder")


def _finite(loss: Tensor) -> float:
    value = float(loss)
    if not math.isfinite(value):
        raise Diverged(f"the loss is {value}: train again with a smaller --learning-rate")
    return value


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first.cpu(), second.cpu())
