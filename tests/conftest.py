import os

import pytest
import torch

from paceline.core.machine import freeze_loaded_objects, usable_cores
from paceline.kernels.cpu import native
from paceline.kernels.formats.weights import Dense

# Triton reads this when it is imported: without a GPU, its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tiny models gain nothing from more threads, and other test processes need the cores.
torch.set_num_threads(1)
native.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than cores: tests of processes wait for starts, ends and time limits, and another test can use the core."""
    return usable_cores() + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU, tests that take long in the interpreter are `slow`."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("interpreted"):
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Collect garbage as a server does: without imported objects, and less often. Python's default would take a fifth of
    the time of the tests that generate with many sequences."""
    freeze_loaded_objects()


@pytest.fixture
def unrounded_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts without rounding to 8 or 4 bits, which would hide small errors."""
    from paceline.models.heads import vocabulary

    monkeypatch.setattr(vocabulary, "quantize", lambda values, kind: Dense(values))
    monkeypatch.setattr(vocabulary, "four_bits", Dense)
