"""A fake model with one scripted answer."""

from collections.abc import Iterator, Sequence
from typing import Any

import tokenizers
from tokenizers.models import WordLevel

from paceline.core.output import StepOutput
from paceline.core.request import SamplingParams
from paceline.core.sequence import FinishReason, Origin
from paceline.model_files.tokenizer.tokenizer import Tokenizer

WORDS = ("<end>", "one", "two", "three", "four", "five")


def word_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<end>"))
    return Tokenizer(backend, bos_id=None, eos_ids=(0,), special_tokens={}, chat_template=None)


def step(
    tokens: Sequence[int], origins: Sequence[Origin], text: str, drafted: int = 0, accepted: int = 0
) -> StepOutput:
    reason = FinishReason.STOP if 0 in tokens else None
    return StepOutput("r", 0, 0, tuple(tokens), tuple(origins), text, drafted, accepted, finish_reason=reason)


ANSWER = (
    step([1], [Origin.PLAIN], "one"),
    step([2, 3, 4], [Origin.ACCEPTED, Origin.ACCEPTED, Origin.BONUS], " two three four", 2, 2),
    step([5, 0], [Origin.ACCEPTED, Origin.RECOVERED], " five", 3, 1),
)


class ScriptedLLM:
    """Answers every prompt with `ANSWER`. `interrupt`: the step of the next answer that raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.tokenizer = word_tokenizer()
        self.prompts: list[Any] = []
        self.interrupt: int | None = None
        self.error: Exception | None = None
        self.cancelled = 0

    def stream(self, prompt: Any, sampling: SamplingParams, **options: Any) -> Iterator[StepOutput]:
        self.prompts.append(prompt)
        if self.error is not None:
            raise self.error
        finished = False
        try:
            for i, output in enumerate(ANSWER):
                if i == self.interrupt:
                    raise KeyboardInterrupt
                yield output
            finished = True
        finally:
            self.cancelled += not finished

    def __enter__(self) -> "ScriptedLLM":
        return self

    def __exit__(self, *_: object) -> None:
        pass
