"""The training loop, with checkpoints to resume from.

`StateCache` computes the target's hidden states of the text at first use, and caches them if all of them fit. `DraftOptimizer`
and `LearningRate` are the optimizer of a draft and its schedule.
"""

import math
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.clock import Clock
from paceline.core.errors import InvalidConfig, PacelineError
from paceline.tools.progress import Stopped, StopRequest
from paceline.tools.train.drafts import Draft
from paceline.tools.train.evaluate import Evaluation, evaluate
from paceline.tools.train.layers import DraftVocabulary
from paceline.tools.train.loss import compute_loss
from paceline.tools.train.target import States, Target
from paceline.tools.train.text_files import Text

SHARES = {"cuda": 0.8, "cpu": 0.6}
"""Share of the free memory that the cache may take."""


class StateCache:
    """Hidden states by row of text. A row of a later epoch costs a copy instead of a forward pass."""

    def __init__(
        self, target: Target, ids: Tensor, state_layers: tuple[int, ...], max_bytes: int | None = None
    ) -> None:
        """`ids` [N, S] are on the target's device. If `max_bytes` is None, the limit is a share of the free memory."""
        self._target, self._ids, self._state_layers = target, ids, state_layers
        width = (1 + len(state_layers)) * target.config.hidden_size  # last state, then captured layers
        size = ids.numel() * width * target.dtype.itemsize
        if max_bytes is None:
            max_bytes = int(_free_bytes(target.device) * SHARES[target.device.type])
        self.is_caching = size <= max_bytes
        self._is_cached = torch.zeros(len(ids), dtype=torch.bool)
        if self.is_caching:
            self._cache = torch.empty(*ids.shape, width, dtype=target.dtype, device=target.device)

    def of(self, rows: Tensor) -> States:
        """`rows` [B] int64, on the host."""
        where = rows.to(self._ids.device)
        ids = self._ids[where].long()
        if not self.is_caching:
            return self._target.states(ids, self._state_layers)
        size = self._target.config.hidden_size
        if bool(self._is_cached[rows].all()):
            last, inner = self._cache[where].split([size, self._cache.shape[-1] - size], -1)
            return States(ids, last, inner if self._state_layers else None)
        states = self._target.states(ids, self._state_layers)
        both = states.last if states.inner is None else torch.cat([states.last, states.inner], -1)
        self._cache[where] = both
        self._is_cached[rows] = True
        return states


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Learning rate and length of a training: a linear warm-up, then a cosine to zero.

    The training ends after `steps` or `seconds`, whichever comes first.
    """

    learning_rate: float = 1e-3
    steps: int | None = None
    seconds: float | None = None
    warmup: int = 100

    def done(self, step: int, seconds: float) -> float:
        """The share of the training that is done. It is 1 at the end."""
        by_steps = step / self.steps if self.steps else 0.0
        by_clock = seconds / self.seconds if self.seconds else 0.0
        return min(1.0, max(by_steps, by_clock))

    def rate(self, step: int, seconds: float) -> float:
        warm = min(1.0, (step + 1) / self.warmup)
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * self.done(step, seconds)))


class DraftOptimizer:
    """Muon for matrices, AdamW for all other weights, with one learning rate: Muon's steps are scaled to AdamW's size."""

    def __init__(self, draft: nn.Module) -> None:
        trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
        self._trained = trained
        matrices = [parameter for parameter in trained if parameter.ndim == 2]
        others = [parameter for parameter in trained if parameter.ndim != 2]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
        if others:
            fused = others[0].device.type == "cuda"
            self._parts.append(torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=fused))

    def step(self, rate: float) -> None:
        """Apply the current gradients, clipped to norm 1, and clear them."""
        nn.utils.clip_grad_norm_(self._trained, 1.0)
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            with warnings.catch_warnings():
                # Muon computes in bf16; a CPU without bf16 falls back with this warning.
                warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
                part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, content: list[dict[str, Any]]) -> None:
        for part, state in zip(self._parts, content, strict=True):
            part.load_state_dict(state)


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
