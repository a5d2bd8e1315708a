"""For the conftest.py of every folder of tests that run GPU kernels, on a GPU or interpreted."""

from importlib.util import find_spec

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
