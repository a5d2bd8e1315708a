"""Files of models, each in a folder whose other files are well-formed.

An input of `gguf` or `safetensors` is the beginning of the file: bytes of weights, all zero, follow it.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError
from paceline.model_files.tokenizer import tokenizer_check
from paceline.model_files.tokenizer.chat_template import ChatTemplate
from paceline.model_files.tokenizer.tokenizer import tokenizer_from_folder
from paceline.models.loading import load
from tests.fuzz.mutations import TEMPLATE_FRAGMENTS, mutate_bytes, mutate_json, text_mutator
from tests.fuzz.target import CORPUS, FuzzTarget

FREE_MEMORY = 256 << 20
"""Memory that the loaders believe to be free: they must refuse models that need more."""
WEIGHT_BYTES = 104_064
"""Bytes of the weights of the safetensors file in the corpus. Those of the GGUF file are fewer."""
FILES = {
    "model_config": "config.json",
    "safetensors": "model.safetensors",
    "tokenizer": "tokenizer.json",
    "tokenizer_config": "tokenizer_config.json",
    "template": "chat_template.jinja",
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a b\n\tc"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    },
    {"role": "tool", "content": "1", "tool_call_id": "c"},
]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": "x", "parameters": {"type": "object"}}}
]
folder = Path(tempfile.mkdtemp(prefix="paceline-fuzz-"))
for name, file in FILES.items():
    content = (CORPUS / name / "seed").read_bytes()
    (folder / file).write_bytes(content + bytes(WEIGHT_BYTES if name == "safetensors" else 0))


def fuzz_folder(file: str, padding: int = 0) -> Callable[[bytes], bool]:
    """A function that loads the folder with another content of one file, which `padding` zero bytes follow."""

    def fuzz(data: bytes) -> bool:
        return _load(folder, folder / file, data + bytes(padding))

    return fuzz


def fuzz_gguf(data: bytes) -> bool:
    path = folder / "model.gguf"
    try:
        return _load(path, path, data + bytes(WEIGHT_BYTES))
    finally:
        path.unlink()


def _load(model: Path, path: Path, content: bytes) -> bool:
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(content)
    tokenizer_check._checked.clear()  # a file may change twice within the resolution of its time
    load.available_memory = lambda: FREE_MEMORY
    try:
        loaded = load.load_model(model)
        use_tokenizer(loaded.tokenizer)
    except PacelineError:
        return False
    else:
        return True
    finally:
        if before is not None:
            path.write_bytes(before)


def use_tokenizer(tokenizer: Any) -> None:
    tokenizer.decode(tokenizer.encode("ab c 1"))
    if tokenizer.chat_template is not None:
        ChatTemplate.of(tokenizer).render([{"role": "user", "content": "x"}])


def fuzz_tokenizer(data: bytes) -> bool:
    """Without the weights, which take most of the time."""
    path = folder / "tokenizer.json"
    before = path.read_bytes()
    path.write_bytes(data)
    tokenizer_check._checked.clear()
    try:
        use_tokenizer(tokenizer_from_folder(folder))
    except PacelineError:
        return False
    else:
        return True
    finally:
        path.write_bytes(before)


def fuzz_template(data: bytes) -> bool:
    try:
        template = ChatTemplate(data.decode("utf-8", "replace"), {"bos_token": "<s>", "eos_token": "</s>"})
        template.render(MESSAGES, tools=TOOLS, variables={"enable_thinking": True})
    except PacelineError:
        return False
    return True


TARGETS = {
    "template": FuzzTarget(fuzz_template, text_mutator(TEMPLATE_FRAGMENTS), 4096),
    "tokenizer": FuzzTarget(fuzz_tokenizer, mutate_json, 8192),
    "tokenizer_config": FuzzTarget(fuzz_folder("tokenizer_config.json"), mutate_json, 4096),
    "gguf": FuzzTarget(fuzz_gguf, mutate_bytes, 16384),
    "safetensors": FuzzTarget(fuzz_folder("model.safetensors", WEIGHT_BYTES), mutate_bytes, 8192),
    "index": FuzzTarget(fuzz_folder("model.safetensors.index.json"), mutate_json, 8192),
    "model_config": FuzzTarget(fuzz_folder("config.json"), mutate_json, 4096),
}
