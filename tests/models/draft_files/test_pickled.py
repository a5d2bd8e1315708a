"""Pickled weights: tensors are read, everything else is refused, and nothing is executed."""

from pathlib import Path

import pytest
import torch

from paceline.core.errors import UnsupportedModel
from paceline.models.draft_files.pickled import PickledWeights


def test_tensors_are_read_as_they_were_saved(tmp_path: Path) -> None:
    rows = torch.arange(12.0).reshape(3, 4)
    stored = {"a": rows.t(), "b": rows[1].bfloat16(), "c": torch.arange(3), "d": torch.nn.Parameter(rows)}
    torch.save(stored, tmp_path / "weights.bin")
    weights = PickledWeights(tmp_path / "weights.bin")
    assert weights.names() == {"a", "b", "c", "d"}
    assert weights.shape("a") == (4, 3)
    assert torch.equal(weights.matrix("a").dequantize(), rows.t())
    assert torch.equal(weights.vector("b"), rows[1])
    assert [name for name in "abcd" if weights.is_float(name)] == ["a", "b", "d"]
    assert not weights.tensor("d").requires_grad
    assert weights.file_bytes == (tmp_path / "weights.bin").stat().st_size
    with pytest.raises(UnsupportedModel, match="has no weight e"):
        weights.vector("e")


@pytest.mark.parametrize(
    "contents",
    [
        {"a": 1},
        {1: torch.ones(2)},
        torch.ones(2),
        {"a": torch.ones(2).to_sparse()},
        {"a": torch.ones(1).expand(1 << 40)},
    ],
)
def test_other_contents_are_refused(tmp_path: Path, contents: object) -> None:
    torch.save(contents, tmp_path / "weights.bin")
    with pytest.raises(UnsupportedModel, match=r"not a dictionary of names and tensors|holds other objects"):
        PickledWeights(tmp_path / "weights.bin")
