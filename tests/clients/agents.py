"""Coding agents as their users start them: each one's command, settings and environment for a server, and its run in a folder.

Telemetry, updates and other traffic are switched off by the variables that the agent documents.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.environments import FOLDER, client_environment

MODEL = "local"
"""The model name that agents send."""
KEY = "none"
CONTEXT = 28_672
"""Tokens of the served window: the longest prompt of an agent has about 20,000."""
TRANSCRIPTS = FOLDER / "transcripts"
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r")


@dataclass(frozen=True)
class Agent:
    """A program with its arguments, environment, and the files of its home."""

    name: str
    command: Sequence[str]
    """`TASK` stands for the task."""
    environment: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    """Contents of files by their path in the home."""


def aider(url: str, seconds: float, *options: str) -> Agent:
    """Runs `python test_calc.py` after each edit, and sends what it prints to the model if it fails."""
    off = "--no-git --no-check-update --analytics-disable --no-show-release-notes --no-show-model-warnings --no-detect-urls"
    command = [
        str(client_environment("aider") / "aider"),
        "--model",
        f"openai/{MODEL}",
        "--map-tokens",
        "0",
        *off.split(),
    ]
    command += ["--no-pretty", "--yes-always", "--no-suggest-shell-commands", "--timeout", str(seconds)]
    command += ["--test-cmd", f"{sys.executable} test_calc.py", "--auto-test", *options, "--message", "TASK", "calc.py"]
    variables = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    # aider downloads the prices of models that this file does not name.
    known = {f"openai/{MODEL}": {"litellm_provider": "openai", "mode": "chat", "max_input_tokens": CONTEXT}}
    return Agent("aider", command, variables, {".aider.model.metadata.json": json.dumps(known)})


def mini_swe_agent(url: str, seconds: float) -> Agent:
    command = [str(client_environment("mini-swe-agent") / "mini"), "-m", f"openai/{MODEL}", "-t", "TASK", "-y"]
    command += ["-l", "0", "--exit-immediately", "-c", "mini.yaml", "-c", f"model.model_kwargs.timeout={seconds}"]
    command += ["-c", "model.model_kwargs.temperature=0", "-c", "agent.step_limit=12"]
    variables = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    variables |= {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}
    return Agent("mini-swe-agent", command, variables)


def codex(url: str, seconds: float) -> Agent:
    settings = f"""
model = "{MODEL}"
model_provider = "paceline"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.paceline]
name = "Paceline"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
stream_idle_timeout_ms = {int(1000 * seconds)}
"""
    command = [str(client_environment("codex") / "codex"), "exec", "--skip-git-repo-check"]
    command += ["--sandbox", "workspace-write", "TASK"]
    return Agent("codex", command, {"OPENAI_API_KEY": KEY}, {".codex/config.toml": settings})


def claude_code(url: str, seconds: float) -> Agent:
    command = [str(client_environment("claude-code") / "claude"), "-p", "TASK", "--allowedTools", "Write"]
    off = "DISABLE_TELEMETRY DISABLE_ERROR_REPORTING DISABLE_AUTOUPDATER CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"
    waits = ("API_TIMEOUT_MS", "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS", "CLAUDE_STREAM_IDLE_TIMEOUT_MS")
    variables = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": KEY, **dict.fromkeys(waits, str(int(1000 * seconds)))}
    return Agent("claude-code", command, variables | dict.fromkeys(off.split(), "1"))


def run_agent(agent: Agent, task: str, folder: Path, home: Path, seconds: float, label: str) -> str:
    """Runs the agent in `folder` for at most `seconds`, and ends all that it started. Returns what it printed, which it also
    keeps as a transcript under `label`."""
    for path, text in agent.files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text, "utf-8")
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "SSL_CERT_FILE") if name in os.environ}
    environment = {**kept, "HOME": str(home), "NO_COLOR": "1", "TERM": "dumb", **agent.environment}
    command = [task if word == "TASK" else word for word in agent.command]
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        text += f"\n[ended after {seconds:.0f} s]\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    text = COLOURS.sub("", text)
    TRANSCRIPTS.mkdir(parents=True, exist_ok=True)
    ended = f"[{label}: exit code {process.returncode} after {time.monotonic() - began:.1f} s]\n"
    (TRANSCRIPTS / f"{label}.txt").write_text(text + ended, "utf-8")
    return text
