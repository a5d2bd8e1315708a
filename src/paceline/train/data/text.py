"""Text the target wrote, in a file that every training of a draft for it can share."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.clock import Clock
from paceline.core.errors import InvalidConfig, InvalidRequest
from paceline.train.data.corpus import Corpus, Script
from paceline.train.data.writer import Writer, Written

TEMPERATURES = (0.0, 0.0, 0.6, 1.0)
"""Of the answers, row by row: half of them greedy, since that is how text is written most often."""


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """N rows of S tokens."""

    ids: Tensor  # [N, S] int32
    answer: Tensor  # [N, S] bool
    kinds: tuple[str, ...]  # [N]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        return self.ids.numel()


@dataclass(frozen=True, slots=True)
class TextPlan:
    """What a text file was made from; another plan is another file."""

    target: str
    vocabulary: str
    length: int
    prompts: tuple[str, ...]
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class TextFile:
    """Text to train on, and held-out text with greedy answers."""

    plan: TextPlan
    train: Text
    held_out: Text
    batches: int
    """Written so far: where the next one goes on."""
    seconds: float
    """That it took to write them."""

    def save(self, path: Path) -> None:
        content = {"plan": asdict(self.plan), "batches": self.batches, "seconds": self.seconds}
        for name, text in (("train", self.train), ("held_out", self.held_out)):
            content[name] = {"ids": text.ids, "answer": text.answer, "kinds": text.kinds}
        part = path.with_name(path.name + ".part")
        torch.save(content, part)
        os.replace(part, path)


def load_text(path: Path) -> TextFile:
    try:
        content: dict[str, Any] = torch.load(path, mmap=True, weights_only=True)
        plan = TextPlan(**content["plan"] | {"prompts": tuple(content["plan"]["prompts"])})
        train, held_out = (Text(**content[name]) for name in ("train", "held_out"))
        return TextFile(plan, train, held_out, content["batches"], content["seconds"])
    except (OSError, KeyError, TypeError, RuntimeError) as error:
        raise InvalidRequest(f"{path} is not a file of written text: {error}", field="text") from error


def extend_text(
    path: Path,
    plan: TextPlan,
    writer: Writer,
    corpus: Corpus,
    held_out: Callable[[], Text],
    is_enough: Callable[[TextFile], bool],
    clock: Clock,
    said: Callable[[int, float], None],
) -> TextFile:
    """Write batches until `is_enough`, saving after each: an interruption costs one batch at the most and changes none. `said`
    hears of tokens and seconds, those of earlier calls included."""
    if path.exists():
        file = load_text(path)
        if file.plan != plan:
            raise InvalidConfig(f"{path} was written with {file.plan}, not {plan}: name another file, or delete it")
    else:
        nothing = Text(
            torch.zeros(0, plan.length, dtype=torch.int32), torch.zeros(0, plan.length, dtype=torch.bool), ()
        )
        file = TextFile(plan, nothing, held_out(), 0, 0.0)
        file.save(path)
    temperatures = torch.tensor([TEMPERATURES[row % len(TEMPERATURES)] for row in range(writer.rows)])
    before, started, size = file.seconds, clock.now(), writer.rows * writer.length

    def seconds() -> float:
        return before + clock.now() - started

    while not is_enough(file):
        number = plan.seed + 1 + file.batches
        supply = corpus.scripts(number)
        scripts = [next(supply) for _ in range(writer.rows)]
        writer.seed(number)

        def wrote(done: float, have: int = file.train.num_tokens) -> None:
            said(have + round(done * size), seconds())

        written = writer.write(scripts, temperatures, wrote)
        train = _joined(file.train, scripts, written)
        file = TextFile(plan, train, file.held_out, file.batches + 1, seconds())
        file.save(path)
    return file


def write_greedily(writer: Writer, scripts: Sequence[Script], said: Callable[[float], None]) -> Text:
    """Held-out text: answers at temperature 0, as many batches as it takes."""
    text = Text(torch.zeros(0, writer.length, dtype=torch.int32), torch.zeros(0, writer.length, dtype=torch.bool), ())
    for start in range(0, len(scripts), writer.rows):
        batch = list(scripts[start : start + writer.rows])
        padded = batch + batch[:1] * (writer.rows - len(batch))
        text = _joined(text, batch, writer.write(padded, torch.zeros(writer.rows), said))
    return text


def _joined(text: Text, scripts: Sequence[Script], written: Written) -> Text:
    count = len(scripts)
    kinds = (*text.kinds, *(script.kind for script in scripts))
    return Text(torch.cat([text.ids, written.ids[:count]]), torch.cat([text.answer, written.answer[:count]]), kinds)
