"""Coding agents, unmodified, change files through a server; the files are judged, not what the agents print or return.

First with the scripted model, then with Qwen2.5-Coder-1.5B. The prompts of Codex and Claude Code have 10,000 tokens and more.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.clients.agents import Agent, aider, claude_code, codex, mini_swe_agent, run_agent
from tests.clients.matrix import PROTOCOL, QWEN, record

pytestmark = pytest.mark.clients

SECONDS = 300.0
QWEN_SECONDS = 3600.0
FIX = "The test test_calc.py fails: add(2, 3) in calc.py must return 5. Change calc.py so that `python test_calc.py` passes."
CREATE = "Create the file hello.txt with the word hi in it."
CALC = "def add(a, b):\n    return a - b\n"
CHECK = """\
import pathlib
import calc

pathlib.Path("ran.txt").write_text("the test ran")
assert calc.add(2, 3) == 5, f"add(2, 3) is {calc.add(2, 3)}"
print("all tests passed")
"""
MEND, CREATE_CHECK = "edits a file and runs a test", "creates a file by a call and finishes"
FINISHED = "I created hello.txt."
"""The scripted model's answer to the result of the call."""
LEAST_PROMPT = 6000
"""Tokens of each prompt of Codex and Claude Code, at the least."""
MENDING: dict[str, Callable[[str, float], Agent]] = {"aider": aider, "mini-swe-agent": mini_swe_agent}
CREATING: dict[str, Callable[[str, float], Agent]] = {"codex": codex, "claude-code": claude_code}


def mend(agent: Agent, folder: Path, seconds: float, label: str) -> str:
    """The agent edits a file and runs a test, in several turns. Returns what it printed."""
    project = folder / "project"
    project.mkdir()
    (project / "calc.py").write_text(CALC, "utf-8")
    (project / "test_calc.py").write_text(CHECK, "utf-8")
    return run_agent(agent, FIX, project, folder / "home", seconds, label)


def is_mended(folder: Path) -> bool:
    """Whether the test has run, and passes."""
    project = folder / "project"
    done = subprocess.run([sys.executable, "test_calc.py"], cwd=project, capture_output=True, timeout=60)
    return (project / "ran.txt").exists() and done.returncode == 0


def create(agent: Agent, folder: Path, seconds: float, label: str) -> str:
    """The agent creates a file by a call of a tool, and finishes. Returns what it printed."""
    project = folder / "project"
    project.mkdir()
    return run_agent(agent, CREATE, project, folder / "home", seconds, label)


def is_created(folder: Path) -> bool:
    file = folder / "project" / "hello.txt"
    return file.exists() and file.read_text("utf-8").strip() == "hi"


def counters(url: str) -> dict[str, float]:
    """Counters of the server: requests, those with an error, refused ones, prompt tokens, and cached ones of them."""
    text = httpx.get(f"{url}/metrics", timeout=60).text

    def total(pattern: str) -> float:
        return sum(float(value) for value in re.findall(rf"^paceline_{pattern} (\S+)$", text, re.MULTILINE))

    names = {"prompt": r"prompt_tokens_total\{.*\}", "cached": r"cached_prompt_tokens_total\{.*\}"}
    names |= {"requests": r"requests_total\{.*\}", "errors": r"requests_total\{.*outcome=\"error\".*\}"}
    names |= {"rejected": r"rejected_total\{.*\}"}
    return {name: total(pattern) for name, pattern in names.items()}


@pytest.mark.parametrize("name", MENDING)
def test_an_agent_edits_a_file_and_runs_the_test(name: str, scripted_url: str, tmp_path: Path) -> None:
    text = mend(MENDING[name](scripted_url, SECONDS), tmp_path, SECONDS, f"{name}-script")
    error = "" if is_mended(tmp_path) else "the test does not pass"
    record(name, PROTOCOL, {MEND: error})
    assert not error, text


@pytest.mark.parametrize("name", CREATING)
def test_an_agent_creates_a_file_by_a_call_and_finishes(name: str, scripted_url: str, tmp_path: Path) -> None:
    """Turn 2 has the result of the call, and nearly all of its prompt is in the cache."""
    before = counters(scripted_url)
    text = create(CREATING[name](scripted_url, SECONDS), tmp_path, SECONDS, f"{name}-script")
    error = "" if is_created(tmp_path) else "the file is missing"
    record(name, PROTOCOL, {CREATE_CHECK: error})
    assert not error, text
    assert FINISHED in text
    used = {key: value - before[key] for key, value in counters(scripted_url).items()}
    assert (used["requests"], used["errors"], used["rejected"]) == (2, 0, 0)
    assert used["prompt"] > 2 * LEAST_PROMPT
    assert used["cached"] > 0.45 * used["prompt"]


@pytest.mark.parametrize("name", [*MENDING, *CREATING])
def test_an_agent_with_qwen(name: str, qwen_url: str, tmp_path: Path) -> None:
    """The server answers all that the agent sends. Whether the file is right depends on the model, and is recorded."""
    before = counters(qwen_url)
    if name in MENDING:
        check, text = MEND, mend(MENDING[name](qwen_url, QWEN_SECONDS), tmp_path, QWEN_SECONDS, f"{name}-qwen")
        is_done = is_mended(tmp_path)
    else:
        check, text = (
            CREATE_CHECK,
            create(CREATING[name](qwen_url, QWEN_SECONDS), tmp_path, QWEN_SECONDS, f"{name}-qwen"),
        )
        is_done = is_created(tmp_path)
    used = {key: value - before[key] for key, value in counters(qwen_url).items()}
    record(name, QWEN, {check: "" if is_done else "ModelFault: the model makes no call that does it"})
    assert used["requests"] > 0, text
    assert (used["errors"], used["rejected"]) == (0, 0), text
