from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli import train as module
from paceline.tools.train import run
from paceline.tools.train.plan import TrainPlan

app = typer.Typer()
app.command()(module.train)
app.command("other")(lambda: None)


def test_options_become_a_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[TrainPlan] = []

    def fake(plan: TrainPlan, command: str, clock: Any, progress: Any, stop: Any) -> None:
        seen.append(plan)
        progress.begin("training")
        progress.show(0.5, "half")
        progress.note("a line that stays")

    monkeypatch.setattr(run, "train", fake)
    arguments = ["train", "eagle", "--out", str(tmp_path), "--minutes", "2.5", "--draft-vocab", "4096", "--compile"]
    arguments += ["--prompts", "a.jsonl", "--prompts", "b.jsonl"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130, result.output  # no record: interrupted
    wanted = TrainPlan(
        kind="eagle",
        out=tmp_path,
        minutes=2.5,
        draft_vocab=4096,
        compile=True,
        prompts=(Path("a.jsonl"), Path("b.jsonl")),
    )
    assert seen == [wanted]
    assert "training  50%  half" in result.output  # without a terminal, progress is lines
    assert "a line that stays" in result.output


def test_unknown_kind_is_rejected(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "falcon", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "eagle" in result.output


def test_help_lists_every_field() -> None:
    result = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for name in TrainPlan.__dataclass_fields__:
        assert name in ("kind",) or f"--{name.replace('_', '-')}" in result.output
