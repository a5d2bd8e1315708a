"""The text a training needs, written by the target unless a file already holds it."""

import gc
import hashlib
from collections.abc import Callable, Sequence

import torch

from paceline.core.clock import Clock
from paceline.core.errors import InvalidConfig
from paceline.models.tokenizer.tokenizer import Tokenizer
from paceline.train.data.corpus import Corpus, Script, read_prompts, split
from paceline.train.data.request_log import RequestLog
from paceline.train.data.text import Text, TextFile, TextPlan, extend_text, load_text, write_greedily
from paceline.train.data.turns import turns_of
from paceline.train.data.writer import Writer
from paceline.train.drafts.target import Target, identity
from paceline.train.evaluate import answers
from paceline.train.interrupt import Stopped
from paceline.train.plan import TrainPlan
from paceline.train.progress import Progress

HELD_OUT_ROWS = 48
JUDGED_TOKENS = 256
"""Of every answer to a prompt of the evaluation file."""


class Material:
    def __init__(
        self,
        plan: TrainPlan,
        target: Target,
        tokenizer: Tokenizer,
        clock: Clock,
        progress: Progress,
        stop: Callable[[], bool],
    ) -> None:
        self._plan, self._target, self._tokenizer = plan, target, tokenizer
        self._clock, self._progress, self._stop, self._turns = clock, progress, stop, turns_of(tokenizer)
        log = RequestLog(tokenizer, self._turns)
        self._train_prompts, self._held_prompts = split([p for path in plan.prompts for p in read_prompts(path, log)])
        self._judged = read_prompts(plan.evaluate, log) if plan.evaluate else []
        both = {p.text for p in self._train_prompts + self._held_prompts} & {p.text for p in self._judged}
        if both:
            raise InvalidConfig(
                f"{len(both)} prompts of {plan.evaluate} are also given with --prompts, such as {min(both)[:60]!r}: "
                "a draft is not judged by what it has learnt"
            )

    def text(self) -> TextFile:
        """The shared file, written as far as the plan asks. `Stopped`: the user wishes so; what is written stays."""
        plan, path = self._plan, self._plan.text_file
        path.parent.mkdir(parents=True, exist_ok=True)
        asked = TextPlan(
            target=self._target.name,
            vocabulary=identity(self._target.name, self._tokenizer)["vocabulary"],
            length=plan.length,
            prompts=tuple(sorted(p.name for p in plan.prompts)),
            seed=plan.seed,
        )

        def done(tokens: int, seconds: float) -> float:
            by_clock = 0.0 if plan.seconds_of_text is None else seconds / plan.seconds_of_text
            return min(1.0, max(tokens / plan.text_tokens, by_clock))

        def is_enough(file: TextFile) -> bool:
            return file.batches > 0 and done(file.train.num_tokens, file.seconds) >= 1.0

        def said(tokens: int, seconds: float) -> None:
            self._say(done(tokens, seconds), f"{tokens:,} tokens, {tokens / max(1e-9, seconds):,.0f} a second")

        if path.exists() and (file := load_text(path)).plan == asked and is_enough(file):
            return file
        writer = Writer(self._target, self._turns, plan.writer_rows, plan.length, plan.seed)
        corpus = Corpus(self._tokenizer, self._turns, self._train_prompts, plan.prompt_share)
        self._progress.begin("writing")
        file = extend_text(path, asked, writer, corpus, self._held_out, is_enough, self._clock, said)
        del writer
        _free()
        return file

    def judged(self) -> Text | None:
        """Greedy answers to the evaluation prompts, kept beside the text file; prompts too long for the target's
        positions are left out."""
        plan = self._plan
        if plan.evaluate is None:
            return None
        path = plan.text_file.with_suffix(f".{plan.evaluate.stem}.pt")
        checksum = hashlib.sha256(plan.evaluate.read_bytes()).hexdigest()
        vocabulary = identity(self._target.name, self._tokenizer)["vocabulary"]
        asked = TextPlan(self._target.name, vocabulary, 0, (checksum,), 0)  # rows are as long as they need to be
        if path.exists() and (kept := load_text(path)).plan == asked:
            return kept.held_out
        corpus = Corpus(self._tokenizer, self._turns, (), 0.0)
        limit = self._target.config.max_position - JUDGED_TOKENS - len(self._turns.to_answer)
        scripts = sorted((corpus.script_of(prompt) for prompt in self._judged), key=lambda script: len(script.ids))
        short = [script for script in scripts if len(script.ids) <= limit]
        if not short:
            raise InvalidConfig(f"no prompt of {plan.evaluate} leaves the target room for {JUDGED_TOKENS} tokens")
        self._progress.begin("answering")
        kinds: list[str] = []
        rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        for start in range(0, len(short), 64):  # of similar length: all rows of a batch are as long as the longest
            batch = short[start : start + 64]
            length = len(batch[-1].ids) + len(self._turns.to_answer) + JUDGED_TOKENS

            def answered(done: float, before: int = start, now: int = len(batch)) -> None:
                self._say((before + done * now) / len(short), f"{len(short)} prompts of {plan.evaluate}")

            text = self._greedy(batch, length, answered)
            for row, kind in enumerate(text.kinds):
                rows.append((text.ids[row], _first_answer(text.answer[row])))
                kinds.append(kind)
        longest = max(len(ids) for ids, _ in rows)
        ids, answer = (
            torch.stack([torch.nn.functional.pad(row[i], (0, longest - len(row[i]))) for row in rows]) for i in (0, 1)
        )
        found = Text(ids, answer, tuple(kinds))
        nothing = Text(ids[:0], answer[:0], ())
        TextFile(asked, nothing, found, 0, 0.0).save(path)
        return found

    def _held_out(self) -> Text:
        corpus = Corpus(self._tokenizer, self._turns, self._held_prompts, self._plan.prompt_share)
        supply = corpus.scripts(self._plan.seed)
        scripts = [next(supply) for _ in range(min(HELD_OUT_ROWS, self._plan.writer_rows))]
        return self._greedy(scripts, self._plan.length, lambda done: self._say(done, "what is held out"))

    def _greedy(self, scripts: Sequence[Script], length: int, said: Callable[[float], None]) -> Text:
        writer = Writer(self._target, self._turns, len(scripts), length, self._plan.seed)
        text = write_greedily(writer, scripts, said)
        del writer
        _free()
        return text

    def _say(self, done: float, words: str) -> None:
        if self._stop():
            raise Stopped
        self._progress.show(done, words)


def _first_answer(answer: torch.Tensor) -> torch.Tensor:
    """Only the first answer of a row, and of it only so much."""
    kept = torch.zeros_like(answer)
    for start, end in answers(answer):
        kept[start : min(end, start + JUDGED_TOKENS)] = True
        break
    return kept


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
