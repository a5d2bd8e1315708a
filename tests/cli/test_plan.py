import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli.commands import cli

LOAD = ("--rate", "20", "--seconds", "10", "--prompt-tokens", "500", "--output-tokens", "100", "--max-workers", "6")


def words(text: str) -> str:
    """The text without line breaks, which depend on the width of the terminal."""
    return " ".join(text.split())


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ("plan", *arguments), env={"COLUMNS": "200"})


def test_a_plan_with_its_reasons_and_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures, plot = tmp_path / "a.json", tmp_path / "a.png"
    files = ("--json", str(figures), "--plot", str(plot))
    result = run(*LOAD, "--alpha", "0.8", "--tpot-ms", "6", "--ttft-ms", "500", "--explain", *files)
    assert result.exit_code == 0, result.output
    assert "of requests meet the objective, at $" in words(result.stdout)
    document = json.loads(figures.read_text("utf-8"))
    assert document["is_met"] is True
    assert document["choice"]["report"]["attainment"] >= 0.99
    assert document["choice"] in document["evaluations"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert result.stdout.endswith(f"wrote {figures}\nwrote {plot}\n")


def test_an_objective_that_cannot_be_met_has_status_1() -> None:
    result = run(*LOAD, "--ttft-ms", "1")
    assert result.exit_code == 1
    assert "No cluster within the limits meets the objective" in words(result.stdout)


def test_without_alpha_the_plan_says_that_no_worker_drafts() -> None:
    assert "give --alpha" in words(run(*LOAD).stdout)


def test_a_limit_below_one_worker_is_one_line() -> None:
    result = run(*LOAD, "--max-dollars", "1")
    assert result.exit_code == 2
    assert "one target worker costs $2.69" in words(result.stderr)
