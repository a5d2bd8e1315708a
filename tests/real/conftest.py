"""Published checkpoints as GGUF files, in the folder that the environment variable MODELS names."""

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

FILES = {
    "qwen-coder-1.5b.gguf": "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    "qwen-coder-0.5b.gguf": "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    "gemma3-270m.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "tinyllama.gguf": "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
    "stories15m.gguf": "d7e9bd896a0e7f2b3a11f681a49a5307e191fb0a3e5d2a9ddac4276a473f8949",
}
"""Qwen2.5-Coder Instruct of 1.5B and 0.5B (Q4_K_M), Gemma 3 270M (Q4_K_M), TinyLlama 1.1B Chat (IQ2_XXS) and stories15M of
llama2.c (float32), with the SHA-256 of each file."""


@cache
def published(name: str) -> Path:
    """The file `name`. Skips the test if it is not there, or is another one."""
    folder = os.environ.get("MODELS")
    if not folder:
        pytest.skip("MODELS does not name a folder with published checkpoints")
    path = Path(folder) / name
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != FILES[name]:
            pytest.skip(f"{path} is not the file that these tests were made with: its SHA-256 differs")
    return path


@pytest.fixture(scope="session")
def model() -> Callable[[str], Path]:
    return published
