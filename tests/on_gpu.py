"""For the conftest.py of every folder of tests that run GPU kernels, on a GPU or interpreted."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from paceline.kernels.cpu import native

collect_ignore_glob: list[str] = []

if find_spec("triton") is None:
    collect_ignore_glob.append("test_*.py")
elif not torch.cuda.is_available():
    from tests.kernels.gpu import interpreter

    interpreter.repair()


@pytest.fixture(autouse=True)
def dense_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in the layout of a GPU; a CPU packs them for its own kernels."""
    monkeypatch.setattr(native, "library", lambda: None)


@pytest.fixture
def captures_with_a_run() -> None:
    """For tests of what a capture must undo: it runs its function once, as on a GPU."""


@pytest.fixture(autouse=True)
def captures_without_a_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels are interpreted, a capture does not run its function, unless the test uses `captures_with_a_run`: there is
    nothing to load, and a replay runs it."""
    if torch.cuda.is_available() or "captures_with_a_run" in request.fixturenames:
        return
    from paceline.models.device import cuda_graph

    def construct(self: Any, compute: Any, *_: Any) -> None:
        self._compute, self._graph = compute, None

    monkeypatch.setattr(cuda_graph.Graph, "__init__", construct)
