"""`paceline up`, `status`, `serve`, `down` and `keys`. Workers keep running when the gateway stops."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli import cluster
from paceline.cli.commands import cli
from paceline.cli.workers import view
from paceline.core.status import HandoffCounts, Symptom, WorkerLife, WorkerStatus
from tests.engine.start.test_build import save_checkpoint

LIMITS = {"max_num_seqs": 8, "max_batched_tokens": 64, "max_model_len": 256, "kv_tokens": 2048}


def paceline(*words: str, status: int = 0) -> str:
    """Run a command; return its output."""
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


def generated_text(url: str) -> str:
    body = {"prompt": "abcabc", "max_tokens": 24, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def workers(folder: Path) -> set[int]:
    """Process ids of the workers of this cluster."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "paceline.worker.main" in words and any(str(folder) in word for word in words):
            found.add(process.pid)
    return found


def test_workers_outlive_the_gateway_until_down(cluster_file: Path) -> None:
    folder = cluster_file.parent
    assert "not up" in paceline("status", str(cluster_file), status=2)
    shown = paceline("up", str(cluster_file))
    try:
        assert "target-0" in shown
        assert "draft-0" in shown
        before = workers(folder)
        assert len(before) == 2
        assert "already up" in paceline("up", str(cluster_file), status=2)
        with gateway(cluster_file) as (url, process):
            first = generated_text(url)
            process.send_signal(signal.SIGKILL)
        with gateway(cluster_file) as (url, process):
            assert generated_text(url) == first
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


def test_up_prints_new_warnings_of_the_supervisor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line(level: str, message: str) -> str:
        return json.dumps({"level": level, "message": message}) + "\n"

    log = tmp_path / "supervisor.log"
    log.write_text(line("warning", "before this start"))
    read = cluster.LogWarnings(log)
    read()
    cut = line("warning", "draft-0 ended with status 1")
    with log.open("a") as file:
        file.write(line("info", "informational") + line("warning", "target-0 ended with SIGKILL") + cut[:20])
    read()
    with log.open("a") as file:
        file.write(cut[20:])
    read()
    read()
    assert capsys.readouterr().err == "target-0 ended with SIGKILL\ndraft-0 ended with status 1\n"


def test_up_reports_missing_keys(cluster_file: Path) -> None:
    keys = cluster_file.parent / "keys"
    keys.rename(keys.with_name("elsewhere"))
    assert str(keys) in paceline("up", str(cluster_file), status=2)


def test_interrupted_up_leaves_the_workers_running(cluster_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster, "all_ready", interrupted)
    try:
        result = CliRunner().invoke(cli, ["up", str(cluster_file)], env={"COLUMNS": "200"})
        assert result.exit_code != 0
        assert f"`paceline down {cluster_file}` stops them" in result.output
        assert len(workers(cluster_file.parent)) == 2
    finally:
        paceline("down", str(cluster_file))


def test_serve_without_up_starts_and_stops_the_workers(cluster_file: Path) -> None:
    with gateway(cluster_file) as (url, process):
        generated_text(url)
        assert len(workers(cluster_file.parent)) == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert workers(cluster_file.parent) == set()


WITHOUT_MSGSPEC = """
import sys
sys.modules["msgspec"] = None
from paceline.cli.main import app
for command in ("up", "status", "down"):
    sys.argv = ["paceline", command, sys.argv[-1]]
    try:
        app()
    except SystemExit as end:
        print(end.code)
"""


def test_missing_package_error_has_the_install_command(cluster_file: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_MSGSPEC, str(cluster_file)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert result.stdout == "2\n" * 3
    assert result.stderr == "error: a cluster needs the package `msgspec`: pip install 'paceline[pool]'\n" * 3


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    paceline("keys", str(tmp_path / "keys"))
    secret = (tmp_path / "keys" / "gateway.key_secret").read_text()
    assert "exists" in paceline("keys", str(tmp_path / "keys"), status=2)
    assert (tmp_path / "keys" / "gateway.key_secret").read_text() == secret
    assert (tmp_path / "keys" / "gateway.key_secret").stat().st_mode & 0o077 == 0


def test_ray_needs_a_cluster_file() -> None:
    assert "--config cluster.yaml" in paceline("serve", "--ray", "auto", status=2)


def shown(*workers: WorkerStatus, width: int = 200) -> str:
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(view(workers))
    return capture.get()


def test_status_has_a_row_per_worker_and_a_line_per_symptom() -> None:
    page = shown(
        WorkerStatus(
            "target-0",
            "target",
            "target",
            "ready",
            "tcp://127.0.0.1:1",
            running=12,
            waiting=3,
            kv_use=0.344,
            depth=3.14,
            drafted=1000,
            accepted=484,
            round_trip=0.00041,
            answers=200,
            hits=124,
            late=2,
            symptoms=(Symptom("slow_draft", 0.0312, 0.01, "depth is cut"),),
        ),
        WorkerStatus("draft-0", "draft", "draft", "suspected", "tcp://127.0.0.1:2", queue_seconds=0.0021),
    )
    lines = [line.split() for line in page.splitlines()]
    assert lines[1] == ["target-0", "target", "ready", "12", "3", "34%", "3.1", "48%", "0.41", "ms", "62%", "1%"]
    assert "! target-0: slow_draft, 0.0312 against 0.01; depth is cut" in page
    assert lines[2] == ["draft-0", "draft", "suspected", "0", "2.1", "ms", "-", "-", "-", "-", "-", "-"]


def test_status_shows_the_cost_of_priced_pools() -> None:
    worker = WorkerStatus("target-0", "target", "target", "ready", "tcp://127.0.0.1:1", price=2.69)
    assert "cost: $2.69 an hour, no tokens yet" in shown(worker)
    spent = replace(worker, generated=10**6, life=WorkerLife(started=time.time() - 3600.0))
    assert "cost: $2.69 an hour, $2.69 per million tokens since the start" in shown(spent)
    assert "cost" not in shown(replace(worker, price=None))


def test_narrow_terminal_cuts_no_figure() -> None:
    busy = WorkerStatus(
        "target-0", "target", "target", "loading 12/30 layers from 2 peers", "tcp://127.0.0.1:1", running=12, kv_use=0.344,
        depth=3.14, drafted=1000, accepted=484, round_trip=0.12341, answers=200, hits=124, late=2,
    )  # fmt: skip
    draft = replace(busy, name="draft-0", role="draft", state="suspected", queue_seconds=0.0123, paused_share=0.31)
    page = shown(busy, replace(busy, name="target-1", state="ready"), draft, width=80)
    assert "…" not in page
    lines = [line.split() for line in page.splitlines()]
    assert lines[1] == ["target-0", "target", "loading", "12", "0", "34%", "3.1", "48%", "123.41", "ms", "62%", "1%"]
    assert lines[-1][:3] == ["draft-0", "draft", "suspected"]
    assert lines[-1][-5:] == ["123.41", "ms", "off:", "31%", "1%"]


def test_status_shows_paused_drafting_ahead() -> None:
    draft = WorkerStatus("draft-0", "draft", "draft", "ready", "tcp://127.0.0.1:2", answers=200, hits=124)
    assert "62%" in shown(draft)
    page = shown(replace(draft, paused_share=0.016))
    assert "off: 2%" in page
    assert "62%" not in page


def test_handoff_column_appears_only_with_handoffs() -> None:
    target = WorkerStatus("target-0", "target", "target", "ready", "tcp://127.0.0.1:1")
    given, taken = HandoffCounts(7, 0, 7000, 10**6, 1.0), HandoffCounts(7, 2, 7000, 10**6, 1.0)
    assert "handed" not in shown(target)
    page = shown(
        replace(target, handoffs=taken),
        WorkerStatus("prefill-0", "prefill", "prefill", "ready", "tcp://127.0.0.1:2", handoffs=given),
        WorkerStatus("draft-0", "draft", "draft", "ready", "tcp://127.0.0.1:3"),
    )
    lines = page.splitlines()
    assert lines[0].split()[-1] == "handed"
    assert lines[1].endswith("7 (2 failed)")
    assert lines[2].split()[:3] + lines[2].split()[-1:] == ["prefill-0", "prefill", "ready", "7"]
    assert lines[3].split()[-1] == "-"
    in_place = HandoffCounts(7, 2, 7000, 10**6, 1.0, in_place_bytes=750_000)
    assert shown(replace(target, handoffs=in_place)).splitlines()[1].endswith("7 (2 failed, 75% in place)")


def test_narrow_terminal_cuts_no_handoff_count() -> None:
    prefill = WorkerStatus(
        "prefill-0", "prefill", "prefill", "ready", "tcp://127.0.0.1:1", running=12, kv_use=0.344, depth=3.14,
        drafted=1000, accepted=484, round_trip=0.00123, answers=200, hits=124, late=2,
        handoffs=HandoffCounts(1234, 0, 7000, 10**6, 1.0),
    )  # fmt: skip
    title, row = (line.split() for line in shown(prefill, width=80).splitlines())
    assert title[-1] == "handed"
    assert row[-2:] == ["1%", "1234"]
