"""Servers for clients: with the embedded model, with a model that follows a script, and with Qwen2.5-Coder-1.5B. Also the
embedded model's tokenizer in the format of Hugging Face, for clients that count tokens."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.model_files.tokenizer.gguf_tokenizer import load_tokenizer
from tests.clients.agents import CONTEXT
from tests.clients.scripted import save_tokenizer, scripted_server
from tests.gateway.process import server_process

QWEN = "qwen-coder-1.5b.gguf"
QWEN_START_SECONDS = 900.0


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def whole_file(sign: str) -> str:
    """An answer in aider's edit format `whole`."""
    return f"I change `add`.\n\ncalc.py\n```\ndef add(a, b):\n    return a {sign} b\n```"


EDIT = call("bash", command="sed -i 's/a - b/a + b/' calc.py")
RUN = call("bash", command=f"{sys.executable} test_calc.py")
SUBMIT = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
SCRIPT = [
    ("", "Yes."),
    ("get_weather", call("get_weather", city="Rome")),
    ("sunny, 17 degrees", "It is sunny in Rome: 17 degrees."),
    # aider: the first edit is wrong, so that the test fails.
    ("Act as an expert software developer", whole_file("*")),
    ("add(2, 3) is 6", whole_file("+")),
    # mini-swe-agent
    ("Please solve this issue", f"I edit the file.\n{EDIT}"),
    ('"returncode": 0', f"Now the test.\n{RUN}"),
    ("all tests passed", f"Done.\n{SUBMIT}"),
    ("Codex CLI", call("exec_command", cmd="echo hi > hello.txt")),
    ("Process exited with code 0", "I created hello.txt."),
    ('"name": "Write"', call("Write", file_path="hello.txt", content="hi")),
    ("File created successfully", "I created hello.txt."),
]
"""The scripted model gives the answer of the last text that is in its prompt."""


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    with server_process(
        max_model_len=4096, kv_tokens=16384, any_model_name=True, **{"speculation.depth": "fixed"}
    ) as process:
        yield process.url


@pytest.fixture(scope="session")
def scripted_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models") / "scripted"
    with scripted_server(folder, SCRIPT) as process:
        yield process.url


@pytest.fixture(scope="session")
def qwen_url() -> Iterator[str]:
    folder = os.environ.get("MODELS")
    if not folder:
        pytest.skip(f"MODELS does not name a folder with {QWEN}")
    file = Path(folder) / QWEN
    if not file.exists():
        pytest.skip(f"{file} is not there")
    sizes = {"max_model_len": CONTEXT, "kv_tokens": 2 * CONTEXT, "any_model_name": True}
    with server_process(start_seconds=QWEN_START_SECONDS, model=str(file), **sizes) as process:
        yield process.url


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, load_tokenizer("smollm2"))
    return folder
