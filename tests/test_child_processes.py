"""Child processes are started by `core/child.py` only, so that each of them ends with its parent.

The compiler of kernels forks its own pool, in a process that `core/child.py` has started. `subprocess.run` waits for its
process, and is free. The rule is tested on planted violations, so that it cannot pass by finding nothing to check.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "paceline"
STARTERS = {"core/child.py", "engine/start/compile_child.py"}
"""The modules that may start processes."""

STARTS = {
    "subprocess": {"Popen"},
    "multiprocessing": {"Manager", "Pool", "Process", "get_context"},
    "concurrent.futures": {"ProcessPoolExecutor"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
}
"""What starts processes, by module. `multiprocessing.connection` and the like start none."""


def started(code: str) -> Iterator[str]:
    """What the code uses of `STARTS`, as `module.name`."""
    tree = ast.parse(code)
    names = {}
    """Modules by the name that the code has for them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").removeprefix("torch.")
            yield from (f"{module}.{alias.name}" for alias in node.names if alias.name in STARTS.get(module, ()))
        elif isinstance(node, ast.Attribute):
            value = ast.unparse(node.value)
            module = names.get(value, value).removeprefix("torch.")
            if node.attr in STARTS.get(module, ()):
                yield f"{module}.{node.attr}"


def test_processes_are_started_in_one_module() -> None:
    found = {str(path.relative_to(SOURCE)): set(started(path.read_text("utf-8"))) for path in SOURCE.rglob("*.py")}
    assert {path for path, uses in found.items() if uses} == STARTERS


@pytest.mark.parametrize(
    ("code", "use"),
    [
        ("import subprocess\nsubprocess.Popen(['ls'])", "subprocess.Popen"),
        ("import subprocess as sp\ndef run():\n    return sp.Popen(['ls'])", "subprocess.Popen"),
        ("from subprocess import Popen", "subprocess.Popen"),
        ("import multiprocessing\nmultiprocessing.get_context('fork')", "multiprocessing.get_context"),
        ("from multiprocessing import Process as Child", "multiprocessing.Process"),
        ("import torch.multiprocessing as mp\nmp.get_context('spawn')", "multiprocessing.get_context"),
        ("from concurrent.futures import ProcessPoolExecutor", "concurrent.futures.ProcessPoolExecutor"),
        ("import asyncio\nasyncio.create_subprocess_exec('ls')", "asyncio.create_subprocess_exec"),
    ],
)
def test_planted_starts_are_found(code: str, use: str) -> None:
    assert set(started(code)) == {use}


@pytest.mark.parametrize(
    "code",
    [
        "import subprocess\nsubprocess.run(['ls'], stdout=subprocess.PIPE, check=True)",
        "from multiprocessing.connection import Connection, wait",
        "from torch.multiprocessing.reductions import reduce_tensor",
        "class Pool:\n    Process = 1\nPool.Process",
    ],
)
def test_what_starts_no_process_is_free(code: str) -> None:
    assert not set(started(code))
