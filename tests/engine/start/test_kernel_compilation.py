import json
import sys
from pathlib import Path

import pytest
import torch

from paceline.core.child import PIPE, STDOUT, ChildProcess
from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.engine.start import compile as kernel_compilation
from paceline.engine.start.compile import VARIABLE, KernelCache, KernelCompilation, request_for
from paceline.engine.start.compile_child import GPUS

CONFIG = EngineConfig(model="smollm2", draft="none", speculation=SpeculationConfig(method="ngram"))
REPORT = {
    "kernels": 5,
    "compiled": 4,
    "processes": 2,
    "listed_seconds": 0.1,
    "seconds": 0.2,
    "has_launchers": True,
}


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(kernel_compilation, "gpu_model", lambda device: GPUS["h200"])


def run_instead(monkeypatch: pytest.MonkeyPatch, code: str) -> list[object]:
    """Replace the compiler by a process that runs `code`; returns the requests."""
    requests: list[object] = []

    def run(request: object) -> ChildProcess:
        requests.append(request)
        return ChildProcess([sys.executable, "-c", code], stdout=PIPE, stderr=STDOUT)

    monkeypatch.setattr(kernel_compilation, "run_compiler", run)
    return requests


def test_a_complete_folder_needs_no_second_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = run_instead(monkeypatch, f"print('''{json.dumps(REPORT)}''')")
    for _ in range(2):
        with KernelCompilation.start(CONFIG, torch.device("cuda")) as compilation:
            report = compilation.wait()
        assert report is None or report.kernels == 5
    assert len(requests) == 1


def test_without_launchers_the_next_start_adds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead(monkeypatch, f"print('''{json.dumps(REPORT | {'has_launchers': False})}''')")
    with KernelCompilation.start(CONFIG, torch.device("cuda")) as compilation:
        compilation.wait()
    key, _ = request_for(CONFIG, GPUS["h200"])
    assert not KernelCache.current().is_complete(key)


def test_a_failed_compilation_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    run_instead(monkeypatch, "raise SystemExit('no compiler')")
    with KernelCompilation.start(CONFIG, torch.device("cuda")) as compilation:
        assert compilation.wait() is None
    assert "no compiler" in caplog.text


def test_leaving_the_context_ends_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    run_instead(monkeypatch, "import time; time.sleep(600)")
    with KernelCompilation.start(CONFIG, torch.device("cuda")) as compilation:
        process = compilation._process
    assert process is not None
    assert process.exit_code is not None


def test_a_cpu_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = run_instead(monkeypatch, "")
    with KernelCompilation.start(CONFIG, torch.device("cpu")) as compilation:
        assert compilation.wait() is None
    assert not requests


def test_the_compiler_gets_the_settings_of_the_engine() -> None:
    _, request = request_for(EngineConfig(model="smollm2", kv_disk="/x", max_num_seqs=4), GPUS["h200"], 3)
    config = request.config
    assert (config.device, config.max_num_seqs, config.kv_disk, request.processes) == ("meta", 4, None, 3)
    assert config.draft not in (None, "auto")  # what `auto` means on a GPU
