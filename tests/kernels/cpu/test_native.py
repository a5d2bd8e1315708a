import os
import subprocess
import sys
import threading
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch

from paceline.kernels.cpu import native
from paceline.kernels.formats.linear import DenseWeight
from paceline.kernels.formats.weights import Dense
from paceline.kernels.linear import linear, prepare
from tests.kernels.cases import generator, make_weight, needs_native

FORKED = """
import os
from paceline.kernels.cpu import native
os.fork()
os.write(1, f"{native.available()}\\n".encode())  # one write, which the other process cannot split
"""


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    env = {**os.environ, **environment}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=-1, stderr=-1, text=True)


@needs_native
def test_two_processes_can_build_at_once(tmp_path: Path) -> None:
    """A fake compiler writes the object in two halves. No process may load the first half."""
    compiler = tmp_path / "cc"
    compiler.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys, time\n"
        "if '--version' in sys.argv:\n"
        "    sys.exit()\n"
        f"data = pathlib.Path({str(native._build())!r}).read_bytes()\n"
        "with open(sys.argv[sys.argv.index('-o') + 1], 'wb', buffering=0) as file:\n"
        "    file.write(data[:5000])\n"
        "    time.sleep('-shared' in sys.argv)  # only the shared object is loaded\n"
        "    file.write(data[5000:])\n"
    )
    compiler.chmod(0o700)
    both = start(FORKED, XDG_CACHE_HOME=str(tmp_path), CC=str(compiler))
    assert both.communicate(timeout=100)[0].split() == ["True", "True"]  # the end of the pipe is that of both
    files = list((tmp_path / "paceline").iterdir())
    assert [file.suffix for file in files] == [".so"]  # one object and no partial file


@pytest.fixture
def _unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the kernels anew in this test; the process keeps those it has."""
    monkeypatch.setattr(native, "library", cache(native.library.__wrapped__))


@pytest.mark.usefixtures("_unloaded")
def test_reference_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    with warnings.catch_warnings(action="error"):
        weight = prepare(Dense(torch.ones(2, 32)), "cpu", torch.float32)
        assert isinstance(weight, DenseWeight)
        assert linear(torch.ones(1, 32), weight).tolist() == [[32.0, 32.0]]


@pytest.mark.usefixtures("_unloaded")
@pytest.mark.parametrize("compiler", ["false", "true"])  # fails; succeeds without output
def test_a_broken_compiler_warns_once_and_falls_back(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PACELINE_NATIVE", "1")
    with pytest.warns(RuntimeWarning, match="native kernels are unavailable.*PACELINE_NATIVE=0") as found:
        answers = [native.available() for _ in range(2)]
    assert (answers, len(found)) == ([False, False], 1)


@needs_native
def test_concurrent_callers_get_their_own_results() -> None:
    weight = prepare(make_weight("q4_32", 256, 256), "cpu", torch.float32)
    x = torch.randn(24, 256, generator=generator(0))
    expected = linear(x, weight)
    wrong = []

    def call() -> None:
        for _ in range(50):
            if not torch.equal(linear(x, weight), expected):
                wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_native
def test_the_thread_pool_works_in_a_forked_child() -> None:
    code = (
        "import os, torch\n"
        "from paceline.kernels.cpu import native\n"
        "from paceline.kernels.linear import linear, prepare\n"
        "from paceline.kernels.formats.weights import Dense\n"
        "torch.set_num_threads(1); native.set_num_threads(2)\n"
        "weight = prepare(Dense(torch.randn(512, 64)), 'cpu', torch.float32)\n"
        "x = torch.randn(4, 64); expected = linear(x, weight)\n"
        "child = os.fork()\n"
        "same = all(torch.equal(linear(x, weight), expected) for _ in range(20))\n"
        "if child == 0: os._exit(0 if same else 1)\n"
        "print(same, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    out, err = start(code).communicate(timeout=100)
    assert out.strip() == "True 0", err
