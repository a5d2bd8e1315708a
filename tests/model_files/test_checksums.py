"""Checksums of weights: equal for equal files, different for any others."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.core.errors import UnsupportedModel
from paceline.model_files import checksums
from paceline.model_files.checksums import quick_checksum, weights_checksum


def test_the_checksum_of_one_file_is_its_sha256(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    expected = hashlib.sha256(b"weights").hexdigest()
    assert weights_checksum(file) == weights_checksum(str(tmp_path)) == expected


def test_the_checksum_of_a_folder_covers_all_shards_and_the_config(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"1")
    (tmp_path / "b.safetensors").write_bytes(b"2")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("text")
    checksums_seen = {weights_checksum(tmp_path)}
    (tmp_path / "README.md").write_text("other text")
    assert weights_checksum(tmp_path) in checksums_seen
    for name, content in (("b.safetensors", "3"), ("config.json", "[]"), ("c.safetensors", "")):
        (tmp_path / name).write_text(content)
        assert weights_checksum(tmp_path) not in checksums_seen
        checksums_seen.add(weights_checksum(tmp_path))
    (tmp_path / "a.safetensors").rename(tmp_path / "z.safetensors")
    assert weights_checksum(tmp_path) not in checksums_seen


def test_a_folder_without_weights_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no \.safetensors or \.gguf files"):
        weights_checksum(tmp_path)


def test_the_checksum_of_an_inflated_model_covers_base_and_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "base.gguf"
    file.write_bytes(b"weights")
    monkeypatch.setattr(checksums, "find_model", lambda name: file)
    checksums_seen = {weights_checksum(f"inflate:llama-8b?base=base&noise={noise}") for noise in (0, 0.05)}
    file.write_bytes(b"others")
    checksums_seen.add(weights_checksum("inflate:llama-8b?base=base&noise=0"))
    assert len(checksums_seen) == 3


def test_the_quick_checksum_samples_the_file(tmp_path: Path) -> None:
    first, second = tmp_path / "one.gguf", tmp_path / "other.gguf"
    data = bytearray(i * i % 251 for i in range(1 << 20))
    first.write_bytes(data)
    second.write_bytes(data)
    assert quick_checksum(first) == quick_checksum(second)  # names do not count
    start = (1 << 20) // 3
    data[start : start + 20_000] = bytes(20_000)  # 2% of it
    second.write_bytes(data)
    assert quick_checksum(first) != quick_checksum(second)
    first.write_bytes(first.read_bytes() + b"0")
    assert quick_checksum(first) != quick_checksum(second)


def test_the_quick_checksum_covers_the_config_and_needs_weights(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no \.safetensors or \.gguf files"):
        quick_checksum(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"1")
    (tmp_path / "config.json").write_text("{}")
    before = quick_checksum(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert quick_checksum(tmp_path) != before


def test_the_quick_checksum_reads_the_beginning_of_every_tensor(tmp_path: Path) -> None:
    tensors = {f"layers.{i}": torch.full((3000 + i % 2, 100), float(i)) for i in range(40)}
    tensors["norm"] = torch.ones(64)
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    found = {quick_checksum(tmp_path)}
    for name in ("norm", "layers.17"):
        changed = dict(tensors) | {name: tensors[name].clone()}
        changed[name].view(-1)[5] += 1e-3
        save_file(changed, file)
        found.add(quick_checksum(tmp_path))
    assert len(found) == 3
    for header in (b"\xff" * 8, (2).to_bytes(8, "little") + b"[]", (9).to_bytes(8, "little") + b'{"a": 1} '):
        file.write_bytes(header + b"\0" * 9000)
        found.add(quick_checksum(tmp_path))
    assert len(found) == 6
