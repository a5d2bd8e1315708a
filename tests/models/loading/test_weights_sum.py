"""The checksum of a model's weights: the same for the same files, another for any other."""

import hashlib
from pathlib import Path

import pytest

from paceline.core.errors import UnsupportedModel
from paceline.models.loading import weights_checksum as module
from paceline.models.loading.checksums import quick_checksum, weights_checksum


def test_one_file_is_its_own_sha256(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    expected = hashlib.sha256(b"weights").hexdigest()
    assert weights_checksum(file) == weights_checksum(str(tmp_path)) == expected


def test_a_folder_counts_every_shard_and_the_config(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"1")
    (tmp_path / "b.safetensors").write_bytes(b"2")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("whatever")
    sums = {weights_checksum(tmp_path)}
    (tmp_path / "README.md").write_text("does not matter")
    assert weights_checksum(tmp_path) in sums
    for name, content in (("b.safetensors", "3"), ("config.json", "[]"), ("c.safetensors", "")):
        (tmp_path / name).write_text(content)
        assert weights_checksum(tmp_path) not in sums
        sums.add(weights_checksum(tmp_path))
    (tmp_path / "a.safetensors").rename(tmp_path / "z.safetensors")
    assert weights_checksum(tmp_path) not in sums


def test_no_weights_no_sum(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="holds no weights"):
        weights_checksum(tmp_path)


def test_an_inflated_model_is_its_base_and_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "base.gguf"
    file.write_bytes(b"weights")
    monkeypatch.setattr(module, "find_model", lambda name: file)
    sums = {weights_checksum(f"inflate:llama-8b?base=base&noise={noise}") for noise in (0, 0.05)}
    file.write_bytes(b"others")
    sums.add(weights_checksum("inflate:llama-8b?base=base&noise=0"))
    assert len(sums) == 3


def test_checkpoints_are_told_apart_by_samples(tmp_path: Path) -> None:
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    data = bytearray(i * i % 251 for i in range(1 << 20))
    one.write_bytes(data)
    other.write_bytes(data)
    assert quick_checksum(one) == quick_checksum(other)  # whatever they are called
    start = (1 << 20) // 3
    data[start : start + 20_000] = bytes(20_000)  # 2% of it
    other.write_bytes(data)
    assert quick_checksum(one) != quick_checksum(other)
    one.write_bytes(one.read_bytes() + b"0")
    assert quick_checksum(one) != quick_checksum(other)


def test_a_config_counts_and_a_folder_without_weights_has_no_sum(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no weights"):
        quick_checksum(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"1")
    (tmp_path / "config.json").write_text("{}")
    before = quick_checksum(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert quick_checksum(tmp_path) != before
