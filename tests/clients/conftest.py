"""A server with the embedded model, and its tokenizer in the format of Hugging Face, for clients that count tokens."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.model_files.tokenizer.gguf_tokenizer import load_tokenizer
from tests.gateway.process import server_process


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    with server_process(max_model_len=4096, kv_tokens=16384, **{"speculation.depth": "fixed"}) as process:
        yield process.url


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("tokenizer"), load_tokenizer("smollm2")
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), "utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **tokenizer.special_tokens}), "utf-8")
    return folder
