"""The scripts of examples/ run as they are and print what their docstrings describe."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).parent.parent / "examples"
SECONDS = 900


def run(*command: str) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=SECONDS, env={**os.environ, "PATH": path}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_python(script: str, *arguments: str) -> str:
    return run(sys.executable, str(EXAMPLES / script), *arguments)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def served(*options: str) -> Iterator[str]:
    """`paceline serve` with these options; yields its URL and stops the process afterwards."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "paceline"), "serve", "--port", str(port), *options]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + SECONDS
            while True:
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server did not start"
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def test_every_example_is_in_the_table_and_here() -> None:
    table = (EXAMPLES / "README.md").read_text("utf-8")
    here = Path(__file__).read_text("utf-8")
    scripts = [path for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".sh", ".yaml")]
    assert len(scripts) >= 8
    for path in scripts:
        assert path.name in here, path
        assert path.name in table or f"({path.parent.name})" in table, path


def test_the_script_for_vllm_is_valid() -> None:
    """`make test-vllm` installs vLLM; without it only the syntax is checked."""
    subprocess.run(["bash", "-n", str(EXAMPLES / "vllm_plugin.sh")], check=True)


@pytest.mark.slow
def test_rollout() -> None:
    *rounds, last = run_python("rollout.py", "--rounds", "2").splitlines()
    assert len(rounds) == 2
    fingerprints = [line.split(": ")[1].split(",")[0] for line in (*rounds, last)]
    assert len(set(fingerprints)) == 3
    assert all(name.startswith("fp_") for name in fingerprints)
    for line in rounds:
        assert line.endswith("largest difference of a log-probability 0")
        assert ", 0 drafts accepted" not in line


@pytest.mark.slow
def test_offline() -> None:
    assert "All texts are the same" in run_python("offline.py")


@pytest.mark.slow
def test_streaming() -> None:
    said = run_python("streaming.py", "Count from one to ten.")
    assert " steps" in said.splitlines()[-1]


@pytest.mark.slow
def test_async_chat() -> None:
    said = run_python("async_chat.py").splitlines()
    assert len([line for line in said if line.startswith(("ann: ", "ben: ", "eve: "))]) == 6


def test_custom_proposer() -> None:
    assert "the same text" in run_python("custom_proposer.py")


@pytest.mark.slow  # tests/gateway/openai/test_openai_client.py sends such requests too
def test_http_client() -> None:
    with served("--max-num-seqs", "8", "--kv-tokens", "4096", "--max-model-len", "1024") as url:
        assert "{'city': " in run_python("http_client.py", f"{url}/v1")


@pytest.mark.slow  # tests/tools/orchestrate/test_orchestrator.py runs the loop too
def test_two_endpoints() -> None:
    with served("--max-num-seqs", "8", "--kv-tokens", "4096", "--max-model-len", "1024") as url:
        assert " tokens in " in run_python("two_endpoints.py", url, url)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_cluster(tmp_path: Path) -> None:
    config = yaml.safe_load((EXAMPLES / "cluster" / "cluster.yaml").read_text("utf-8"))
    config |= {"name": f"example-{os.getpid()}", "state_dir": str(tmp_path / "state")}
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(config), "utf-8")
    with served("--config", str(file)) as url:
        said = run_python("cluster/client.py", url)
    assert "tokens from 2 workers" in said
    assert "draft-0: draft, ready" in said


@pytest.mark.slow  # tests/processes/test_models_processes.py runs two models too
@pytest.mark.timeout(SECONDS)
def test_two_models_and_two_gateways(tmp_path: Path) -> None:
    config = yaml.safe_load((EXAMPLES / "cluster" / "two_models.yaml").read_text("utf-8"))
    config |= {"name": f"two-models-{os.getpid()}", "state_dir": str(tmp_path / "state")}
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(config), "utf-8")
    paceline = str(Path(sys.executable).parent / "paceline")
    run(paceline, "up", str(file))
    try:
        with served("--config", str(file)) as first, served("--config", str(file)) as second:
            said = run_python("cluster/two_models.py", first, second)
    finally:
        run(paceline, "down", str(file))
    assert "2 models, 2 gateways: the same texts" in said
    assert said.count("unknown: 404 model_not_found") == 2


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_training(tmp_path: Path) -> None:
    run(str(EXAMPLES / "train_a_draft.sh"), str(tmp_path / "draft"))
    assert (tmp_path / "draft" / "card.md").is_file()
