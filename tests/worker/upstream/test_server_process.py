import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.core.errors import InvalidConfig
from paceline.worker.upstream.process import ServerProcess

SCRIPT = "import sys, time; print(sys.argv, flush=True); time.sleep(60)"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "serve.py"
    path.write_text(SCRIPT, "utf-8")
    return f"{sys.executable} {path}"


def test_the_server_gets_model_port_and_arguments(script: str, capfd: pytest.CaptureFixture[str]) -> None:
    server = ServerProcess(script, "model", ["--dtype", "float32"])
    try:
        deadline = time.monotonic() + 20
        out = ""
        while "float32" not in out and time.monotonic() < deadline:
            time.sleep(0.02)
            out += capfd.readouterr().out
        assert f"'model', '--host', '127.0.0.1', '--port', '{server.port}', '--dtype', 'float32'" in out
        assert server.exit_code is None
        assert server.url == f"http://127.0.0.1:{server.port}"
    finally:
        server.close()
    assert server.exit_code is not None


def test_kv_events_go_through_a_private_folder(script: str) -> None:
    server = ServerProcess(script, "model", [], publishes=True)
    assert server.kv_events is not None
    folder = Path(server.kv_events[0].removeprefix("ipc://")).parent
    assert folder.stat().st_mode & 0o077 == 0
    server.close()
    assert not folder.exists()
    configured = ServerProcess(script, "model", ["--kv-events-config", "{}"], publishes=True)
    assert configured.kv_events is None
    configured.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the signal at the parent's end is Linux's")
def test_the_server_ends_with_a_killed_worker(script: str) -> None:
    code = (
        "import os, signal\n"
        "from paceline.worker.upstream.process import ServerProcess\n"
        f"server = ServerProcess({script!r}, 'm', [])\n"
        "print(server._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60).stdout
    pid = int(out.split()[0])
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text("utf-8").split()[2] == "Z":
            return
        time.sleep(0.02)
    pytest.fail("the server outlived its worker")


def test_a_missing_command_is_named() -> None:
    with pytest.raises(InvalidConfig, match=r"upstream\.executable"):
        ServerProcess("/no/such/vllm serve", "m", [])
