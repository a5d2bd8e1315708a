"""Coding agents, unmodified, change files through a server; the files are judged, not what the agents print or return.

First with the scripted model, then with Qwen2.5-Coder-1.5B. The prompts of Codex and Claude Code have 10,000 tokens and more.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.agents import Agent, aider, claude_code, codex, mini_swe_agent, run_agent

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


@pytest.mark.parametrize("name", MENDING)
def test_an_agent_edits_a_file_and_runs_the_test(name: str, scripted_url: str, tmp_path: Path) -> None:
    text = mend(MENDING[name](scripted_url, SECONDS), tmp_path, SECONDS, f"{name}-script")
    assert is_mended(tmp_path), text
