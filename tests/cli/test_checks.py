"""The checks of `paceline doctor`."""

import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from paceline.cli import doctor_checks as module
from paceline.cli.commands import cli
from paceline.cli.doctor_checks import Check, CheckResult, sketch
from paceline.core.config import EngineConfig
from paceline.core.errors import IncompatibleDraft
from paceline.core.machine import GIB
from paceline.kernels.cpu import native
from paceline.model_files.hub.hub import SHAPES, InflatedShape, Inflation
from paceline.models.loading.load import load_model, open_checkpoint
from paceline.tools.inflate.inflate import make, write_folder, write_tokenizer
from tests.cli.fakes import word_tokenizer
from tests.models.tiny import build
from tests.public_heads import PUBLIC_HEADS


def verdicts(config: EngineConfig) -> dict[str, Check]:
    return {check.name: check for check in module.check_models(config)}


def test_the_embedded_model_fits() -> None:
    result = CliRunner().invoke(cli, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "Ready: paceline serve" in result.stdout
    assert "SmolLM2-135M-Instruct" in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU uses the shipped draft")
def test_missing_draft_on_a_cpu_is_a_note() -> None:
    draft = verdicts(EngineConfig(draft=None))["draft"]
    assert draft.verdict is CheckResult.NOTE
    assert "paceline advise" in draft.advice


def test_a_draft_on_a_cpu_may_be_left_out() -> None:
    draft = verdicts(EngineConfig(device="cpu"))["draft"]
    assert draft.verdict is CheckResult.GOOD
    assert "if it is faster than plain at start" in draft.found


def test_problem_is_status_1_with_advice() -> None:
    result = CliRunner().invoke(cli, ["doctor", "--kv-tokens", "64"], env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert "raise it to" in result.stdout
    assert "1 problem." in result.stdout


def test_missing_target_is_a_problem_apart_from_the_draft() -> None:
    checks = verdicts(EngineConfig(model="/nowhere", draft="smollm2"))
    assert checks["target"].verdict is CheckResult.PROBLEM
    assert checks["draft"].verdict is CheckResult.GOOD
    assert "fit" not in checks


def test_draft_as_large_as_the_target_is_a_note() -> None:
    checks = verdicts(EngineConfig(draft="smollm2"))
    assert checks["pair"].verdict is CheckResult.NOTE
    assert "100%" in checks["pair"].found
    assert checks["fit"].verdict is CheckResult.GOOD


def test_incompatible_draft_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(target: object, draft: object) -> None:
        raise IncompatibleDraft("they differ")

    monkeypatch.setattr(module, "check_compatible", refuse)
    assert verdicts(EngineConfig(draft="smollm2"))["pair"].verdict is CheckResult.PROBLEM


def test_too_little_memory_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.sizing.sizing.total_memory", lambda: GIB // 4)
    fit = verdicts(EngineConfig())["fit"]
    assert fit.verdict is CheckResult.PROBLEM
    assert "max_model_len" in fit.found or "smaller" in fit.found


def test_memory_used_by_other_programs_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: GIB // 2)
    assert verdicts(EngineConfig(device="cpu"))["free memory"].verdict is CheckResult.PROBLEM


def test_weight_size_estimate_is_a_close_upper_bound() -> None:
    sketch = module.sketch("smollm2", torch.device("cpu"), torch.float32)
    real = load_model("smollm2").model.weight_bytes
    assert real <= sketch.model.weight_bytes <= 1.5 * real


def test_disabled_or_unbuildable_kernels_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    assert module._kernels().verdict is CheckResult.NOTE
    monkeypatch.delenv("PACELINE_NATIVE")
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    check = module._kernels()
    assert check.verdict is CheckResult.NOTE
    assert "gcc" in check.advice


def test_missing_packages_have_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name in ("jinja2", "httpx") else object())
    check = module._extras()
    assert check.verdict is CheckResult.NOTE
    assert check.advice == "pip install 'paceline[chat,endpoints]'"


def test_missing_tracing_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> object:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(name)  # as `find_spec` does if the parent package is missing
        return object()

    monkeypatch.setattr(module, "find_spec", find)
    check = module._extras()
    assert "(traces)" in check.found
    assert check.advice == "pip install 'paceline[trace]'"


def test_every_extra_of_all_is_checked() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    (every,) = project["optional-dependencies"]["all"]
    assert set(every.removeprefix("paceline[").removesuffix("]").split(",")) == {
        extra for extra, _ in module.EXTRAS.values()
    }


def test_trained_draft_fits_only_its_target(tmp_path: Path) -> None:
    assert "trained for SmolLM2" in verdicts(EngineConfig(draft="smollm2-eagle"))["draft"].found
    build("llama").save_pretrained(tmp_path / "other")
    write_tokenizer(word_tokenizer(), open_checkpoint(tmp_path / "other").config, tmp_path / "other")
    other = verdicts(EngineConfig(model=str(tmp_path / "other"), draft="smollm2-eagle"))
    assert other["draft"].verdict is CheckResult.PROBLEM
    assert "paceline train" in other["draft"].found


BF16 = torch.bfloat16


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wide = InflatedShape(hidden_size=512, num_layers=4, num_heads=16, num_kv_heads=4, head_dim=32, ffn_size=1024)
    monkeypatch.setitem(SHAPES, "wide", wide)
    build("llama").save_pretrained(tmp_path / "small")
    write_tokenizer(word_tokenizer(), open_checkpoint(tmp_path / "small").config, tmp_path / "small")
    return tmp_path / "small"


@pytest.mark.parametrize("kind", [None, "fp8"])
def test_size_of_an_inflated_model(kind, small: Path) -> None:
    name = f"inflate:wide?base={small}"
    estimate = sketch(name, torch.device("cpu"), BF16, quantize=kind is not None).model.weight_bytes
    assert estimate == pytest.approx(load_model(name, "cpu", BF16, kind).model.weight_bytes, rel=0.02)


def test_size_of_a_folder_in_eight_bits(small: Path, tmp_path: Path) -> None:
    write_folder(make(Inflation("wide", str(small)), torch.device("cpu"), BF16, "fp8"), tmp_path / "large")
    estimate = sketch(str(tmp_path / "large"), torch.device("cpu"), BF16).model.weight_bytes
    assert estimate == pytest.approx(load_model(tmp_path / "large", "cpu", BF16).model.weight_bytes, rel=0.02)


def test_doctor_says_what_a_head_is_and_what_it_costs(tmp_path: Path) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 7, "num_attention_heads": 4, "head_dim": 8}
    build("llama", num_key_value_heads=2, **sizes).save_pretrained(tmp_path / "target")
    write_tokenizer(word_tokenizer(), open_checkpoint(tmp_path / "target").config, tmp_path / "target")
    head = PUBLIC_HEADS["speculators fc_norm"]().save(tmp_path / "head")
    arguments = ["doctor", str(head), "--model", str(tmp_path / "target")]
    result = CliRunner().invoke(cli, arguments, env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    for part in (
        "speculators EAGLE-3: 1 layer of the type llama, states 1, 3, 5 of the target, own head, norm_output, fc_norm",
        "proposes 24 tokens",
        "256 bytes of cache a token, 384 bytes of hidden states",
        "trained for org/target",
        f"--draft {head}",
    ):
        assert part in " ".join(result.stdout.split())  # a console keeps the width that it was made with
    (head / "model.safetensors").write_bytes(b"")
    result = CliRunner().invoke(cli, arguments, env={"COLUMNS": "400"})
    assert result.exit_code == 1
    assert "not a readable safetensors file" in " ".join(result.stdout.split())
