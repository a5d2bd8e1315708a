import os

import pytest
import torch

from paceline.kernels import native
from paceline.kernels.weights import Dense

# Triton decides when it is imported: where there is no GPU, its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tiny models are all overhead: more threads only get in each other's way, and in the way of other test processes.
torch.set_num_threads(1)
native.set_num_threads(1)


@pytest.fixture
def unrounded_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts as they were saved: 8 bits, as a CPU has them, would hide small mistakes."""
    from paceline.models import shared_tables

    monkeypatch.setattr(shared_tables, "quantize", lambda values, kind: Dense(values))
