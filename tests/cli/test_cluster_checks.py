"""The checks of a cluster file: everything that would fail at start is found before."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from paceline.cli.commands import cli
from paceline.cli.doctor_checks import Check, CheckResult
from paceline.cli.doctor_cluster import check_cluster, require_sound
from paceline.core.cluster_config import cluster_config
from paceline.core.errors import InvalidConfig
from paceline.core.machine import GIB
from paceline.deploy.processes.cluster_file import load_cluster
from tests.engine.start.test_build import LETTERS, save_checkpoint

LIMITS = {"max_num_seqs": 8, "max_batched_tokens": 64, "max_model_len": 256, "kv_tokens": 2048}
TEMPLATES = ("{{ messages }}", "{{ message }}")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders: a target, a draft that fits, one with another vocabulary, and one with another chat template."""
    folder = tmp_path_factory.mktemp("models")
    save_checkpoint(folder / "target")
    save_checkpoint(folder / "draft")
    save_checkpoint(folder / "vocabulary", letters=LETTERS[::-1])
    save_checkpoint(folder / "template")
    for name, template in zip(("target", "template"), TEMPLATES, strict=True):
        (folder / name / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def document(models: Path, draft: str = "draft", target: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    common = {"devices": ["cpu"], "limits": LIMITS}
    pools = [
        {"name": "large", "role": "target", "model": str(models / "target"), **common, **(target or {})},
        {"name": "small", "role": "draft", "model": str(models / draft), **common},
    ]
    return {"pools": pools, **more}


def checks(values: dict[str, Any]) -> dict[str, Check]:
    return {check.name: check for check in check_cluster(cluster_config(values))}


def test_a_sound_cluster_has_no_problem(models: Path) -> None:
    found = checks(document(models))
    assert {check.verdict for check in found.values()} == {CheckResult.GOOD}
    assert "4 heads, 2 key-value heads" in found["large"].found
    assert "large-0" in found["cpu"].found
    assert "small-0" in found["cpu"].found
    require_sound(cluster_config(document(models)))


def test_draft_with_another_vocabulary_is_a_problem(models: Path) -> None:
    fits = checks(document(models, "vocabulary"))["small fits"]
    assert fits.verdict is CheckResult.PROBLEM
    assert "token 0 is" in fits.found


def test_draft_with_another_template_is_a_note(models: Path) -> None:
    fits = checks(document(models, "template"))["small fits"]
    assert fits.verdict is CheckResult.NOTE
    assert "chat templates differ" in fits.advice


def test_ranks_that_do_not_divide_the_heads_are_a_problem(models: Path) -> None:
    found = checks(document(models, target={"tensor_parallel_size": 3}))["large"]
    assert found.verdict is CheckResult.PROBLEM
    assert "cannot be split evenly; possible: 1" in found.found


def test_worker_that_does_not_fit_its_share_is_a_problem(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.sizing.sizing.total_memory", lambda: 1 << 16)
    found = checks(document(models))
    assert found["large-0"].verdict is CheckResult.PROBLEM
    assert "do not fit" in found["large-0"].found


def test_device_that_is_too_small_for_all_its_workers_is_a_problem(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = document(models, target={"replicas": 3, "limits": LIMITS | {"memory_fraction": 0.2}})
    needed = checks(values)["cpu"].found
    monkeypatch.setattr(
        "paceline.cli.doctor_cluster.device_facts",
        lambda device: type("Facts", (), {"memory_bytes": GIB // 256}),
    )
    found = checks(values)["cpu"]
    assert found.verdict is CheckResult.PROBLEM
    assert "needs most: lower its kv_tokens" in found.advice
    assert needed.split("=")[0] == found.found.split("=")[0]


def test_missing_model_keys_and_device_are_problems(models: Path) -> None:
    values = document(models, "nowhere", target={"devices": ["cuda:7"]}, keys=str(models / "no-keys"))
    found = checks(values)
    assert [found[name].verdict for name in ("large", "small", "keys")] == [CheckResult.PROBLEM] * 3
    with pytest.raises(InvalidConfig, match=r"this cluster cannot start; keys: .*; large: .*; small: "):
        require_sound(cluster_config(values))


def test_servers_of_other_engines_check_their_models_themselves() -> None:
    values = {
        "name": "other",
        "role": "target",
        "model": "llama",
        "engine": "openai",
        "endpoints": ["http://127.0.0.1:9"],
    }
    found = checks({"pools": [values]})
    assert {check.verdict for check in found.values()} == {CheckResult.GOOD}
    assert "llama on openai" in found["other"].found


def test_on_ray_a_model_of_other_machines_is_not_a_problem(models: Path) -> None:
    found = checks(document(models, "nowhere", ray="auto"))
    assert {check.verdict for check in found.values()} == {CheckResult.GOOD, CheckResult.NOTE}


def test_shipped_example_and_its_distilled_draft(models: Path) -> None:
    path = Path(__file__).parents[2] / "examples" / "cluster" / "cluster.yaml"
    found = {check.name: check for check in check_cluster(load_cluster(path))}
    assert found["draft fits"].verdict is CheckResult.GOOD
    values = document(models)
    values["pools"][1]["model"] = "smollm2-eagle"
    assert "set it as `draft` of the target pool" in checks(values)["small"].found


def test_doctor_and_up_refuse_the_same_cluster(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(document(models, "vocabulary", state_dir=str(tmp_path / "state"))))
    doctor = CliRunner().invoke(cli, ["doctor", str(path)], env={"COLUMNS": "400"})
    assert doctor.exit_code == 1
    assert "token 0 is" in doctor.output
    up = CliRunner().invoke(cli, ["up", str(path)], env={"COLUMNS": "400"})
    assert up.exit_code == 2
    assert "token 0 is" in up.output
    assert not (tmp_path / "state").exists(), "nothing started"
