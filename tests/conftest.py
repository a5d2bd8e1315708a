import gc
import os

import pytest
import torch

from paceline.kernels.cpu import native
from paceline.kernels.weights import Dense

# Triton decides when it is imported: where there is no GPU, its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tiny models are all overhead: more threads only get in each other's way, and in the way of other test processes.
torch.set_num_threads(1)
native.set_num_threads(1)


def pytest_collection_finish() -> None:
    """A million objects were imported and stay: looked through again with every full collection, they would take a seventh of
    the time of tests that make many objects of their own."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def unrounded_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts as they were saved: 8 bits, as a CPU has them, would hide small mistakes."""
    from paceline.models.drafts import vocabulary

    monkeypatch.setattr(vocabulary, "quantize", lambda values, kind: Dense(values))
