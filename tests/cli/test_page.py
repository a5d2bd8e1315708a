"""The commands of docs/planning.md run as printed, in the root of the repository."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.commands import cli
from paceline.planning.profile import load_profile, save_profile
from paceline.planning.traces.trace_files import load_trace

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "planning.md").read_text("utf-8")
COMMANDS = [
    line.strip() for line in PAGE.splitlines() if line.startswith(("    paceline simulate", "    paceline plan "))
]


def test_the_page_has_commands_and_the_trace_has_what_it_says() -> None:
    assert len(COMMANDS) == 5
    trace = load_trace(ROOT / "examples" / "trace.jsonl")
    assert "a synthetic minute of 129 requests" in PAGE
    assert len(trace.requests) == 129
    assert 50.0 < trace.requests[-1].arrival < 60.0


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    save_profile(load_profile("h200-8b"), tmp_path / "worker.json")  # as `paceline profile worker.json` does
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, [*shlex.split(command)[1:], "--seconds", "5"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert ("sim.html" in command) is (tmp_path / "sim.html").exists()
