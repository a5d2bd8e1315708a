import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidConfig
from paceline.engine.start.compile import VARIABLE, KernelCache, engine_key
from paceline.engine.start.compile_child import GPUS, compile_into

CONFIG = EngineConfig(model="smollm2", device="meta", draft="none")


@pytest.fixture(autouse=True)
def unchanged_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "default"))


def test_the_folder_is_that_of_triton(tmp_path: Path) -> None:
    assert KernelCache.current().folder == tmp_path / "default"
    KernelCache(tmp_path / "given").use()
    assert os.environ[VARIABLE] == str(tmp_path / "given")
    assert KernelCache.current().folder == tmp_path / "given"


def test_a_folder_is_complete_for_the_engines_it_was_compiled_for(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    assert not cache.is_complete("a")
    cache.mark_complete("a", 3)
    assert cache.is_complete("a")
    assert not cache.is_complete("b")


def test_a_copied_folder_gets_its_own_paths(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "KEY").mkdir(parents=True)
    (old / "KEY" / "k.cubin").write_text("code")
    group = {"child_paths": {"k.cubin": str(old / "KEY" / "k.cubin")}}
    (old / "KEY" / "__grp__k.json").write_text(json.dumps(group))
    KernelCache(old).mark_complete("a", 1)
    old.rename(new)
    KernelCache(new).use()
    stored = json.loads((new / "KEY" / "__grp__k.json").read_text())
    assert stored == {"child_paths": {"k.cubin": str(new / "KEY" / "k.cubin")}}
    assert KernelCache(new).is_complete("a")


def test_the_key_depends_on_what_decides_the_kernels() -> None:
    key = engine_key(CONFIG, GPUS["h200"], "shapes")
    assert key == engine_key(replace(CONFIG, kernel_cache="x", audit_fraction=0.5), GPUS["h200"], "shapes")
    others = (
        engine_key(replace(CONFIG, max_num_seqs=7), GPUS["h200"], "shapes"),
        engine_key(CONFIG, GPUS["a100"], "shapes"),
        engine_key(CONFIG, GPUS["h200"], "other shapes"),
    )
    assert len({key, *others}) == 4


def test_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match="cannot be created"):
        KernelCache(tmp_path / "file" / "cache").use()


def test_without_a_gpu_the_command_asks_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InvalidConfig, match="--gpu a100 or h100 or h200"):
        compile_into(tmp_path, CONFIG)
    with pytest.raises(InvalidConfig, match="'b9' is unknown"):
        compile_into(tmp_path, CONFIG, "b9")
