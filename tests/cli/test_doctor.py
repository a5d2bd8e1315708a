import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from paceline.bench.inflate import write_tokenizer
from paceline.cli import machine_checks, model_checks
from paceline.cli.check import Check, Verdict
from paceline.cli.commands import cli
from paceline.core.config import EngineConfig
from paceline.core.errors import IncompatibleDraft
from paceline.engine.memory_fit import GIB
from paceline.kernels.cpu import native
from paceline.models.loading.load import load_model, open_checkpoint
from tests.cli.fakes import word_tokenizer
from tests.models.tiny import build


def verdicts(config: EngineConfig) -> dict[str, Check]:
    return {check.name: check for check in model_checks.check_models(config)}


def test_the_embedded_model_fits() -> None:
    result = CliRunner().invoke(cli, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "Ready: paceline serve" in result.stdout
    assert "SmolLM2-135M-Instruct" in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes the draft that ships")
def test_no_draft_is_urged_on_a_cpu_which_takes_none_by_itself() -> None:
    draft = verdicts(EngineConfig())["draft"]
    assert draft.verdict is Verdict.NOTE
    assert "paceline advise" in draft.advice


def test_a_problem_is_status_1_and_says_what_to_change() -> None:
    result = CliRunner().invoke(cli, ["doctor", "--kv-tokens", "64"], env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert "raise it to" in result.stdout
    assert "1 problem." in result.stdout


def test_a_model_that_is_not_there_is_a_problem_of_its_own() -> None:
    checks = verdicts(EngineConfig(model="/nowhere", draft="smollm2"))
    assert checks["target"].verdict is Verdict.PROBLEM
    assert checks["draft"].verdict is Verdict.GOOD
    assert "fit" not in checks


def test_a_draft_as_large_as_the_target_is_advised_against() -> None:
    checks = verdicts(EngineConfig(draft="smollm2"))
    assert checks["pair"].verdict is Verdict.NOTE
    assert "100%" in checks["pair"].found
    assert checks["fit"].verdict is Verdict.GOOD


def test_an_incompatible_draft_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(target: object, draft: object) -> None:
        raise IncompatibleDraft("they differ")

    monkeypatch.setattr(model_checks, "check_compatible", refuse)
    assert verdicts(EngineConfig(draft="smollm2"))["pair"].verdict is Verdict.PROBLEM


def test_a_small_machine_cannot_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.build.device_memory", lambda device: GIB // 4)
    fit = verdicts(EngineConfig())["fit"]
    assert fit.verdict is Verdict.PROBLEM
    assert "max_model_len" in fit.found or "smaller" in fit.found


def test_memory_that_others_use_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "available_memory", lambda: GIB // 2)
    assert verdicts(EngineConfig(device="cpu"))["free memory"].verdict is Verdict.PROBLEM


def test_the_size_of_weights_is_estimated_from_above_and_closely() -> None:
    sketch = model_checks.sketch("smollm2", torch.device("cpu"), torch.float32)
    real = load_model("smollm2").model.weight_bytes
    assert real <= sketch.model.weight_bytes <= 1.5 * real


def test_kernels_that_are_switched_off_or_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    assert machine_checks._kernels().verdict is Verdict.NOTE
    monkeypatch.delenv("PACELINE_NATIVE")
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    check = machine_checks._kernels()
    assert check.verdict is Verdict.NOTE
    assert "gcc" in check.advice


def test_missing_packages_come_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "find_spec", lambda name: None if name in ("jinja2", "httpx") else object())
    check = machine_checks._extras()
    assert check.verdict is Verdict.NOTE
    assert check.advice == "pip install 'paceline[chat,bench]'"


def test_tracing_without_its_packages_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> object:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(name)  # as `find_spec` does where the package around it is missing
        return object()

    monkeypatch.setattr(machine_checks, "find_spec", find)
    check = machine_checks._extras()
    assert "(traces)" in check.found
    assert check.advice == "pip install 'paceline[trace]'"


def test_every_extra_of_all_is_looked_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    (every,) = project["optional-dependencies"]["all"]
    assert set(every.removeprefix("paceline[").removesuffix("]").split(",")) == {
        extra for extra, _ in machine_checks.EXTRAS.values()
    }


def test_a_trained_draft_is_for_one_target(tmp_path: Path) -> None:
    assert "made for SmolLM2" in verdicts(EngineConfig(draft="smollm2-eagle"))["draft"].found
    build("llama").save_pretrained(tmp_path / "other")
    write_tokenizer(word_tokenizer(), open_checkpoint(tmp_path / "other").config, tmp_path / "other")
    other = verdicts(EngineConfig(model=str(tmp_path / "other"), draft="smollm2-eagle"))
    assert other["draft"].verdict is Verdict.PROBLEM
    assert "paceline train" in other["draft"].found
