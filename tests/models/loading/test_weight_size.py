import shutil
from pathlib import Path

import pytest
import torch

from paceline.core.errors import OutOfMemory
from paceline.models.loading import weight_size
from paceline.models.loading.load import load_model, open_checkpoint, weight_bytes
from tests.engine.test_build import save_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def test_what_cannot_fit_is_refused_before_it_is_read(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = weight_bytes(folder, open_checkpoint(folder), CPU, torch.float32, False)
    monkeypatch.setattr(weight_size, "available_memory", lambda: needed - 1)
    with pytest.raises(OutOfMemory, match=r"tiny does not fit: .* or quantization int8 or fp8"):
        load_model(folder)
    monkeypatch.setattr(weight_size, "available_memory", lambda: needed)
    loaded = load_model(folder)
    assert loaded.model.weight_bytes == pytest.approx(needed, rel=0.1)


def test_files_beside_the_weights_do_not_count(folder: str, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "consolidated.safetensors").write_bytes(b"0" * 10**6)
    one, two = (weight_bytes(path, open_checkpoint(path), CPU, torch.bfloat16, True) for path in (folder, copy))
    assert one == two
    one, two = (weight_bytes(path, open_checkpoint(path), CPU, torch.float32, False) for path in (folder, copy))
    assert one == two


def test_the_size_of_a_model_that_is_only_made() -> None:
    name = "inflate:llama-70b?base=smollm2"
    checkpoint = open_checkpoint(name)
    assert weight_bytes(name, checkpoint, CPU, torch.bfloat16, False) == pytest.approx(138e9, rel=0.02)
    assert weight_bytes(name, checkpoint, CPU, torch.bfloat16, True) == pytest.approx(70e9, rel=0.02)
