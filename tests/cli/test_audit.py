"""`paceline audit`: status 0 without differences, 1 with differences, 2 if the audit failed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import audit as module
from paceline.cli.commands import cli
from paceline.engine.start.llm import LLM
from paceline.gateway.audit.audit_log import AuditLog
from tests.engine.start.test_build import save_checkpoint
from tests.tools.audit.planted import COUPLED, REJECTION


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return save_checkpoint(folder / "target"), save_checkpoint(folder / "draft", perturb=0.15)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": letter * 9}) + "\n" for letter in "abcdefgh"))
    return path


def run(prompts: Path | None, models: tuple[str, str], *arguments: str) -> Result:
    options = [
        "--model",
        models[0],
        "--draft",
        models[1],
        "--device",
        "cpu",
        "--kv-tokens",
        "2048",
        "--max-model-len",
        "256",
    ]
    file = [] if prompts is None else [str(prompts)]
    command = ["audit", *file, *options, "--tokens", "12", *arguments]
    return CliRunner().invoke(cli, command, env={"COLUMNS": "200"})


@contextmanager
def planted(monkeypatch: pytest.MonkeyPatch, plant: Any) -> Iterator[None]:
    loaded = module.loaded

    @contextmanager
    def bugged(config: Any) -> Iterator[LLM]:
        with loaded(config) as llm, plant(llm.engine):
            yield llm

    monkeypatch.setattr(module, "loaded", bugged)
    yield
    monkeypatch.setattr(module, "loaded", loaded)


# tests/tools/audit has both rules; the command is the same
@pytest.mark.parametrize("rule", ["coupled", pytest.param("rejection", marks=pytest.mark.slow)])
def test_clean_and_drift(prompts: Path, models: tuple[str, str], tmp_path: Path, rule: str, monkeypatch: Any) -> None:
    page, figures = tmp_path / "audit.html", tmp_path / "audit.json"
    arguments = ("--verification", rule, "--report", str(page), "--json", str(figures), "--temperature", "0.5")
    clean = run(prompts, models, *arguments)
    assert clean.exit_code == 0, clean.output
    assert "clean: " in clean.stdout
    text = " ".join(clean.stdout.split())  # lines are as long as the terminal
    assert "is found among 8 with probability 99%" in text
    assert "<svg" in page.read_text()
    assert clean.stdout.endswith(f"wrote {page}\nwrote {figures}\n")
    report = json.loads(figures.read_text())
    assert (report["clean"], report["about"]["method"], report["about"]["verification"]) == (True, "draft_model", rule)
    assert report["drafted"] > report["accepted"] > 0
    bugs = COUPLED if rule == "coupled" else REJECTION
    with planted(monkeypatch, bugs["a stale KV slot"]):
        drift = run(prompts, models, *arguments)
    assert drift.exit_code == 1
    assert "drift: " in drift.stdout
    assert "Findings" in page.read_text()
    assert not json.loads(figures.read_text())["clean"]


def test_without_a_file_the_built_in_prompts_are_used(models: tuple[str, str]) -> None:
    result = run(None, models, "--limit", "2", "--tokens", "4")
    assert result.exit_code == 0, result.output
    assert "2 of the built-in set" in " ".join(result.stdout.split())


def test_failed_audit_has_status_2(prompts: Path, models: tuple[str, str], monkeypatch: Any) -> None:
    nothing = run(prompts, models, "--speculation-max-depth", "0")
    assert nothing.exit_code == 2
    assert "nothing was drafted" in nothing.stderr
    assert run(prompts.parent / "absent.jsonl", models).exit_code == 2
    assert run(prompts, models, "--method", "unknown").exit_code == 2
    assert run(prompts, models, "--verification", "unknown").exit_code == 2
    assert run(prompts, models, "--report", str(prompts.parent / "absent" / "a.html")).exit_code == 2

    @contextmanager
    def broken(config: Any) -> Iterator[LLM]:
        raise RuntimeError("broken")
        yield

    monkeypatch.setattr(module, "loaded", broken)
    assert run(prompts, models).exit_code == 2

    @contextmanager
    def interrupted(config: Any) -> Iterator[LLM]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(module, "loaded", interrupted)
    stopped = run(prompts, models)
    assert stopped.exit_code == 130
    assert "has no result" in stopped.stderr


def verify(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["audit", "verify", *arguments], env={"COLUMNS": "200"})


def test_verify(tmp_path: Path) -> None:
    path = tmp_path / "trail.jsonl"
    with AuditLog(path) as trail:
        trail.append("started", request="a")
        first = trail.head
        trail.append("finished", request="a")
        trail.append("started", request="b")
        head = trail.head
    whole = verify(str(path))
    assert whole.exit_code == 0
    assert f"3 records, none changed; the head is {head}" in whole.stdout
    assert "not finished: b" in whole.stdout
    assert verify(str(path), "--head", first).exit_code == 0
    assert verify(str(path), "--head", "0" * 64).exit_code == 1
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"c"', 1))
    broken = verify(str(path))
    assert broken.exit_code == 1
    assert "line 1: the line was changed" in broken.stderr
    assert verify(str(tmp_path / "absent")).exit_code == 2
