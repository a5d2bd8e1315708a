import pytest
import torch

from tests.on_gpu import captures_with_a_run, captures_without_a_run, collect_ignore_glob, dense_weights

__all__ = ["captures_with_a_run", "captures_without_a_run", "collect_ignore_glob", "dense_weights"]


@pytest.fixture(autouse=True)
def small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pad mixed passes to fewer rows where kernels are interpreted: a row of padding costs as much as any other."""
    if not torch.cuda.is_available():
        from paceline.kernels.gpu import linear
        from paceline.models.runner.gpu import ragged

        monkeypatch.setattr(ragged, "PADDING", 8)
        monkeypatch.setattr(linear, "MAX_ROWS", 15)  # a padded pass is one of many rows
