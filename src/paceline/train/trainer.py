"""The training loop: batches of written text, one loss, and checkpoints to go on from."""

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.clock import Clock
from paceline.core.errors import InvalidConfig, PacelineError
from paceline.train.data.kept_states import KeptStates
from paceline.train.data.text import Text
from paceline.train.drafts.draft import Draft
from paceline.train.drafts.reduced_vocab import DraftVocabulary
from paceline.train.drafts.target import Target
from paceline.train.evaluate import Evaluation, evaluate
from paceline.train.objective import loss_of
from paceline.train.optimizer import DraftOptimizer
from paceline.train.schedule import Schedule

LOOK_EVERY = 20
"""Steps between looks at the loss on a GPU: each of them waits for it."""
SAVE_SECONDS = 30.0


class Diverged(PacelineError):
    """The loss is no longer a number."""


@dataclass(frozen=True, slots=True)
class Point:
    """One place on the card's curve."""

    tokens: int
    seconds: float
    alphas: tuple[float, ...]
    tokens_a_round: float
    tree_tokens_a_round: float


@dataclass(frozen=True, slots=True)
class Look:
    """What a progress bar shows."""

    done: float
    step: int
    tokens: int
    loss: float
    agreement: tuple[float, ...]
    point: Point | None


class Trainer:
    """Trains `draft` in place on `text`. `run` may be stopped at any time; a trainer made alike with the same checkpoint
    file goes on, and with a schedule of steps ends with the same weights."""

    def __init__(
        self,
        draft: Draft,
        target: Target,
        vocabulary: DraftVocabulary,
        text: Text,
        held_out: Text,
        schedule: Schedule,
        *,
        rows: int,
        seed: int,
        checkpoint: Path,
        clock: Clock,
        points: int = 12,
        compiled: bool = False,
        is_fresh: bool = True,
    ) -> None:
        """`is_fresh`: nothing was learnt yet, so scales are set from the first batch."""
        if not len(text):
            raise InvalidConfig("there is no text to train on: ask for some with --text-tokens or --text-minutes")
        self.draft, self.target, self.vocabulary = draft.to(target.device), target, vocabulary
        self.text, self.held_out, self.schedule, self.rows, self.seed = text, held_out, schedule, rows, seed
        self.step, self.tokens, self.curve = 0, 0, list[Point]()
        self._checkpoint, self._clock, self._points, self._compiled = checkpoint, clock, points, compiled
        self._is_fresh = is_fresh
        self._states = KeptStates(target, text.ids.to(target.device), draft.capture)
        self._head = vocabulary.head(target.head)
        self._optimizer = DraftOptimizer(draft)
        self._before = 0.0  # seconds of earlier runs
        self._order: tuple[int, Tensor] | None = None

    def run(self, said: Callable[[Look], None], stop: Callable[[], bool] = lambda: False) -> None:
        self._resume()
        started = saved = self._clock.now()
        every = LOOK_EVERY if self.target.device.type == "cuda" else 1
        self.draft.train()
        while self.schedule.done(self.step, seconds := self._before + self._clock.now() - started) < 1:
            if stop():
                break
            loss, agreement = self._learn(seconds)
            done = self.schedule.done(self.step, seconds)
            point = None
            if int(done * self._points) > len(self.curve) and done < 1:
                point = self._judge(seconds)
            if point is not None or self.step % every == 0:
                said(Look(done, self.step, self.tokens, _finite(loss), tuple(agreement.tolist()), point))
            if self._clock.now() - saved >= SAVE_SECONDS:
                self.save(self._before + self._clock.now() - started)
                saved = self._clock.now()
        self._before += self._clock.now() - started
        if self.is_done:
            self._judge(self._before)
        self.save(self._before)

    @property
    def is_done(self) -> bool:
        return self.schedule.done(self.step, self._before) >= 1

    @property
    def seconds(self) -> float:
        return self._before

    def evaluate(self, text: Text) -> Evaluation:
        return evaluate(self.draft, self.target, self.vocabulary, text)

    def batch(self, step: int) -> Tensor:
        """[rows] int64, rows of the text: each once an epoch, in an order of its own; the same for the same step and seed."""
        picked = []
        for place in range(step * self.rows, (step + 1) * self.rows):
            epoch, index = divmod(place, len(self.text))
            if self._order is None or self._order[0] != epoch:
                shuffle = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                self._order = epoch, torch.randperm(len(self.text), generator=shuffle)
            picked.append(self._order[1][index])
        return torch.stack(picked)

    def _learn(self, seconds: float) -> tuple[Tensor, Tensor]:
        states = self._states.of(self.batch(self.step))
        if self.step == 0 and self._is_fresh:
            self.draft.calibrate(self.target, states)
        half = self.target.dtype == torch.bfloat16
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=half):
            loss = loss_of(self.draft, self.target, self._head, self.vocabulary, states, self._compiled)
        loss.total.backward()
        self._optimizer.step(self.schedule.rate(self.step, seconds))
        self.step += 1
        self.tokens += states.ids.numel()
        return loss.total.detach(), loss.agreement

    def _judge(self, seconds: float) -> Point:
        found = self.evaluate(self.held_out)
        chain, tree = found.chain_overall, found.tree_overall
        point = Point(self.tokens, round(seconds, 1), chain.alphas, chain.tokens_a_round, tree.tokens_a_round)
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
            raise self._of_another()
        try:
            self.draft.load_state_dict(content["draft"])
            self._optimizer.load_state_dict(content["optimizer"])
        except (RuntimeError, ValueError) as error:  # another kind, or other shapes
            raise self._of_another() from error
        self.step, self.tokens, self._before = content["step"], content["tokens"], content["seconds"]
        self.curve = [Point(**point | {"alphas": tuple(point["alphas"])}) for point in content["curve"]]

    def _of_another(self) -> InvalidConfig:
        return InvalidConfig(f"{self._checkpoint} is of another training: delete it, or name another folder")


def _finite(loss: Tensor) -> float:
    value = float(loss)
    if not math.isfinite(value):
        raise Diverged(f"the loss is {value}: train again with a smaller --learning-rate")
    return value


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.cpu(), other.cpu())
