"""A server whose model answers from a script: HTTP, templates, parsers, the engine and its cache are the real ones, the model's
forward pass alone is not. It stores the token ids in the KV cache, and picks the next token of the answer.

`python -m tests.clients.scripted SPEC` runs its target worker.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.engine.start import build
from paceline.kernels.cpu.decoder import Sampler
from paceline.kernels.formats.layout import AfterLayer
from paceline.model_files.tokenizer.gguf_tokenizer import load_tokenizer
from paceline.model_files.tokenizer.tokenizer import Tokenizer
from paceline.models.decoder import DecoderModel, ForwardOutput
from paceline.models.runner.runner import ModelRunner, Span
from paceline.worker.main import main
from tests.engine.start.test_build import save_checkpoint
from tests.gateway.process import Process, server_process

Script = Sequence[tuple[str, str]]
"""Pairs of a text and an answer. The model gives the answer of the last pair whose text is in the prompt."""

ANSWER_HEADER, END = "<|im_start|>assistant\n", "<|im_end|>"
SCRIPT_FILE = "script.json"
WORKER = """
import sys
from functools import partial
from paceline.deploy import engine_process

command = lambda spec: [sys.executable, "-m", "tests.clients.scripted", spec.to_json()]
engine_process.Supervisor = partial(engine_process.Supervisor, command=command)
"""
"""Makes the server start the worker of this module."""
MAX_MODEL_LEN = 65_536


class Answers:
    """The next token after any ids."""

    def __init__(self, tokenizer: Tokenizer, script: Script) -> None:
        self._tokenizer = tokenizer
        self._header = tokenizer.encode(ANSWER_HEADER, add_special=False)
        self._end = tokenizer.encode(END, add_special=False)
        self._script = [(text, [*tokenizer.encode(answer, add_special=False), *self._end]) for text, answer in script]
        self._answers: dict[bytes, list[int]] = {}

    def next_token(self, ids: np.ndarray[Any, Any]) -> int:
        (starts,) = np.nonzero(ids == self._header[0])
        size = len(self._header)
        starts = [int(i) for i in starts if ids[i : i + size].tolist() == self._header]
        if not starts:  # a pass that measures time
            return self._end[0]
        prompt = ids[: starts[-1] + size]
        answer = self._answer(prompt)
        return answer[min(len(ids) - len(prompt), len(answer) - 1)]

    def _answer(self, prompt: np.ndarray[Any, Any]) -> list[int]:
        key = prompt.tobytes()
        if key not in self._answers:
            text = self._tokenizer.decode(prompt.tolist(), skip_special=False)
            self._answers[key] = [answer for part, answer in self._script if part in text][-1]
        return self._answers[key]


class ScriptedRunner(ModelRunner):
    """A runner whose KV cache holds the ids of the tokens, so that it knows a cached prefix as a model does."""

    def __init__(self, model: DecoderModel, num_blocks: int, answers: Answers) -> None:
        super().__init__(model, num_blocks, torch.float32)
        self._ids = self.cache[0][0].view(num_blocks * BLOCK_SIZE, -1)[:, 0].numpy()
        self._answers = answers

    @property
    def can_pick(self) -> bool:
        return False

    def forward(
        self,
        spans: Sequence[Span],
        state_layers: tuple[int, ...] = (),
        last_hidden: bool = False,
        after_layer: AfterLayer | None = None,
        samplers: Sequence[Sampler] | None = None,
    ) -> ForwardOutput:
        picked = [token for span in spans for token in self._run(span)]
        logits: Tensor | None = None
        if picked:
            logits = torch.full((len(picked), self.model.config.vocab_size), -100.0)
            logits[torch.arange(len(picked)), torch.tensor(picked)] = 0.0
        return ForwardOutput(logits, None, {})

    def _run(self, span: Span) -> Iterator[int]:
        """Stores the tokens of the span. Yields the next token after each row that has logits."""
        positions = np.arange(span.context_len + len(span.tokens))
        slots = np.asarray(span.blocks)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        self._ids[slots[span.context_len :]] = span.tokens
        ids = self._ids[slots].astype(np.int64)
        for row in range(len(span.tokens) - span.num_logits, len(span.tokens)):
            seen = range(row + 1)
            if span.ancestors is not None:
                seen = [i for i in seen if span.ancestors[row] >> i & 1]  # type: ignore[assignment]
            yield self._answers.next_token(ids[[*range(span.context_len), *(span.context_len + i for i in seen)]])


def save_scripted_model(folder: Path, script: Script) -> Path:
    """A checkpoint with the tokenizer of the embedded model, small random weights that are not used, and the script."""
    tokenizer = load_tokenizer("smollm2")
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.eos_ids)}
    save_checkpoint(folder, vocab_size=tokenizer.vocab_size, max_position_embeddings=MAX_MODEL_LEN, **ids)
    save_tokenizer(folder, tokenizer)
    (folder / SCRIPT_FILE).write_text(json.dumps(list(script)), "utf-8")
    return folder


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """The tokenizer in the format of Hugging Face."""
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), "utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **tokenizer.special_tokens}), "utf-8")


@contextmanager
def scripted_server(folder: Path, script: Script, **config: Any) -> Iterator[Process]:
    """A server process with an engine process, as `paceline serve` starts them, whose model follows the script."""
    model = save_scripted_model(folder, script)
    sizes = {"kv_tokens": 2 * MAX_MODEL_LEN, "max_model_len": MAX_MODEL_LEN, "any_model_name": True}
    with server_process(before=WORKER, model=str(model), device="cpu", **{**sizes, **config}) as process:
        yield process


def run_worker(spec: str) -> int:
    """A target worker whose runner follows the script in the model's folder."""
    folder = Path(json.loads(spec)["engine"]["model"])
    answers = Answers(load_tokenizer(str(folder)), json.loads((folder / SCRIPT_FILE).read_text("utf-8")))
    build.make_runner = lambda model, num_blocks, *_: ScriptedRunner(model, num_blocks, answers)
    return main(spec)


if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1]))
