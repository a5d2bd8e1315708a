"""up, status, serve, down and keys, as an operator types them; workers outlive the gateway."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from typer.testing import CliRunner

from paceline.cli import up
from paceline.cli.commands import cli
from tests.engine.test_build import save_checkpoint

LIMITS = {"max_num_seqs": 8, "max_batched_tokens": 64, "max_model_len": 256, "kv_tokens": 2048}


def paceline(*words: str, status: int = 0) -> str:
    """What the command prints."""
    result = CliRunner().invoke(cli, [*words], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "target")
    save_checkpoint(tmp_path / "draft", perturb=0.3)
    paceline("keys", str(tmp_path / "keys"))
    document: dict[str, Any] = {
        "name": "cli",
        "state_dir": str(tmp_path / "state"),
        "keys": str(tmp_path / "keys"),
        "gateway": {"port": 0, "log_level": "warning"},
        "pools": [
            {
                "name": "target",
                "role": "target",
                "model": str(tmp_path / "target"),
                "devices": ["cpu"],
                "limits": LIMITS,
                "speculation": {"depth": "fixed", "max_depth": 3},
            },
            {"name": "draft", "role": "draft", "model": str(tmp_path / "draft"), "devices": ["cpu"], "limits": LIMITS},
        ],
    }
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@contextmanager
def gateway(path: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "serve", "--config", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None  # noqa: PT018
    try:
        first = process.stdout.readline()
        assert " at http://" in first, first + process.stderr.read()
        yield first.split(" at ")[1].split()[0], process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def text_of(url: str) -> str:
    body = {"prompt": "abcabc", "max_tokens": 24, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def workers(folder: Path) -> set[int]:
    """Processes whose command names this cluster's models."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "paceline.runtime.deploy.worker" in words and any(str(folder) in word for word in words):
            found.add(process.pid)
    return found


def test_workers_outlive_the_gateway_and_end_with_down(cluster_file: Path) -> None:
    folder = cluster_file.parent
    assert "not up" in paceline("status", str(cluster_file), status=2)
    shown = paceline("up", str(cluster_file))
    try:
        assert "target-0" in shown
        assert "draft-0" in shown
        before = workers(folder)
        assert len(before) == 2
        assert "is up already" in paceline("up", str(cluster_file), status=2)
        with gateway(cluster_file) as (url, process):
            first = text_of(url)
            process.send_signal(signal.SIGKILL)
        with gateway(cluster_file) as (url, process):
            assert text_of(url) == first
            page = httpx.get(f"{url}/metrics").text
            assert 'paceline_worker_ready{model="' in page
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        assert workers(folder) == before
        report = json.loads(paceline("status", str(cluster_file), "--json"))
        assert {(w["name"], w["state"]) for w in report["workers"]} == {("target-0", "ready"), ("draft-0", "ready")}
    finally:
        paceline("down", str(cluster_file))
    assert workers(folder) == set()
    paceline("down", str(cluster_file), status=1)


def test_up_repeats_what_the_supervisor_complains_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line(level: str, message: str) -> str:
        return json.dumps({"level": level, "message": message}) + "\n"

    log = tmp_path / "supervisor.log"
    log.write_text(line("warning", "of the time before"))
    look = up.Warnings(log)
    look()
    cut = line("warning", "draft-0 ended with status 1")
    with log.open("a") as file:
        file.write(line("info", "nothing to say") + line("warning", "target-0 ended with SIGKILL") + cut[:20])
    look()
    with log.open("a") as file:
        file.write(cut[20:])
    look()
    look()
    assert capsys.readouterr().err == "target-0 ended with SIGKILL\ndraft-0 ended with status 1\n"


def test_up_says_itself_what_keeps_the_workers_from_starting(cluster_file: Path) -> None:
    keys = cluster_file.parent / "keys"
    keys.rename(keys.with_name("elsewhere"))
    assert str(keys) in paceline("up", str(cluster_file), status=2)


def test_an_interrupted_up_leaves_its_workers_and_says_so(cluster_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(up, "all_ready", interrupted)
    try:
        result = CliRunner().invoke(cli, ["up", str(cluster_file)], env={"COLUMNS": "200"})
        assert result.exit_code != 0
        assert f"`paceline down {cluster_file}` stops them" in result.output
        assert len(workers(cluster_file.parent)) == 2
    finally:
        paceline("down", str(cluster_file))


def test_serve_alone_brings_its_workers_and_takes_them_along(cluster_file: Path) -> None:
    with gateway(cluster_file) as (url, process):
        text_of(url)
        assert len(workers(cluster_file.parent)) == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert workers(cluster_file.parent) == set()


@pytest.mark.parametrize("command", ["up", "status", "down"])
def test_a_missing_package_is_named_with_its_command(cluster_file: Path, command: str) -> None:
    code = "import sys; sys.modules['msgspec'] = None; from paceline.cli.main import app; app()"
    result = subprocess.run(
        [sys.executable, "-c", code, command, str(cluster_file)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr == "error: a cluster needs the package `msgspec`: pip install 'paceline[pool]'\n"


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    paceline("keys", str(tmp_path / "keys"))
    secret = (tmp_path / "keys" / "gateway").read_text()
    assert "exists" in paceline("keys", str(tmp_path / "keys"), status=2)
    assert (tmp_path / "keys" / "gateway").read_text() == secret
    assert (tmp_path / "keys" / "gateway").stat().st_mode & 0o077 == 0


def test_ray_is_for_a_cluster() -> None:
    assert "--config cluster.yaml" in paceline("serve", "--ray", "auto", status=2)
