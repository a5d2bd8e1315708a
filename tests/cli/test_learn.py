"""`paceline learn` and its commands on a folder."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import console
from paceline.cli.commands import cli
from paceline.cli.train import _without_key
from paceline.tools.learn import run as learning_run
from paceline.tools.learn.versions import Activity, VersionFolder
from paceline.tools.train.plan import LearnPlan
from tests.gateway.fakes import served
from tests.gateway.live import running
from tests.tools.learn.test_versions import add


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.out, "width", 300)


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, ["learn", *arguments], env={"COLUMNS": "300", **environment})


@pytest.fixture
def folder(tmp_path: Path) -> VersionFolder:
    (tmp_path / "base").mkdir()
    folder = VersionFolder(tmp_path / "out")
    folder.create(tmp_path / "base", "http://server")
    return folder


def test_options_become_a_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plans: list[LearnPlan] = []
    monkeypatch.setattr(learning_run, "learn", lambda plan, *rest: plans.append(plan))
    out = str(tmp_path / "out")
    result = run(
        "http://server", "--draft", "smollm2-eagle", "--out", out, "--minutes", "3", PACELINE_ADMIN_KEY="secret"
    )
    assert result.exit_code == 0, result.output
    (plan,) = plans
    assert (plan.server, plan.draft, plan.minutes, plan.key) == ("http://server", "smollm2-eagle", 3.0, "secret")
    assert plan.out == Path(out)


def test_a_server_that_refuses_samples_ends_it_before_the_models_are_read(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with running(served()) as url:  # without admin routes
        result = run(url, "--draft", "smollm2-eagle", "--model", str(tmp_path), "--out", str(out))
    assert result.exit_code == 2
    assert "no admin routes (set `admin_key` or `api_keys` there)" in " ".join(result.stderr.split())
    assert "reading the target" not in result.stderr
    assert not out.exists()


def test_every_option_is_in_the_help() -> None:
    shown = run("run", "--help").stdout
    assert all(f"--{one.name.replace('_', '-')}" in shown for one in fields(LearnPlan) if one.name != "server")


def test_status_shows_versions_and_reasons(folder: VersionFolder) -> None:
    add(folder, 1, "kept")
    folder.write_activity(Activity(1, "now", "waiting for samples", 7, 1000, 2000))
    shown = run("status", str(folder.path)).stdout
    for word in ("http://server", "0001", "waiting for samples", "1,000 new tokens of 2,000", "0.500 -> 0.600", "kept"):
        assert word in shown


def test_status_without_versions_says_so(folder: VersionFolder) -> None:
    assert "no version yet" in run("status", str(folder.path)).stdout


def test_pause_resume_and_rollback(folder: VersionFolder) -> None:
    add(folder, 1, "kept")
    assert run("pause", str(folder.path)).exit_code == 0
    assert folder.state().is_paused
    assert "paused" in run("status", str(folder.path)).stdout
    assert run("resume", str(folder.path)).exit_code == 0
    assert not folder.state().is_paused
    assert "version 1 is refused" in run("rollback", str(folder.path)).stdout
    assert folder.current() == 0
    result = run("rollback", str(folder.path))
    assert result.exit_code == 2
    assert "nothing to roll back" in result.stderr


def test_a_folder_without_a_learner_is_an_error(tmp_path: Path) -> None:
    result = run("status", str(tmp_path))
    assert result.exit_code == 2
    assert "not the folder of a learner" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0.0}, "--share must be over 0"),
        ({"replay": 0.95}, "--replay must be between 0 and 0.9"),
        ({"epochs": 0.0}, "--epochs must be above 0"),
        ({"rows": 0}, "--rows must be at least 1"),
        ({"server": "localhost"}, "must be a URL"),
        ({"pool": "drafts"}, "belong together"),
    ],
)
def test_invalid_plans_are_rejected(options: dict[str, Any], message: str) -> None:
    from paceline.core.errors import InvalidConfig

    plan = LearnPlan(**{"server": "http://s", "draft": "d", "out": Path("o"), **options})
    with pytest.raises(InvalidConfig, match=message):
        plan.check()


def test_the_key_is_not_written_into_cards() -> None:
    assert _without_key(["learn", "--key", "secret", "--out", "o", "--key=other"]) == ["learn", "--out", "o"]
