"""Tiers built from user settings: a model on disk, a folder for blocks, a restart."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidConfig, OutOfMemory
from paceline.core.request import SamplingParams
from paceline.engine.start.build import build_engine
from paceline.engine.start.llm import LLM
from paceline.engine.tiers import make_tiers
from tests.engine.harness import engine_of
from tests.engine.start.test_build import save_checkpoint
from tests.fakes import StepClock

PROMPT = [i * i % 35 for i in range(100)]
SAMPLING = SamplingParams(max_tokens=8, temperature=0.9, seed=4, ignore_eos=True)


def llm(model: str, **settings: Any) -> LLM:
    return LLM(model, max_model_len=256, kv_tokens=512, device="cpu", speculation={"enabled": False}, **settings)


def run_prompt(one: LLM) -> tuple[list[int], int]:
    """Output tokens, and the number of cached prompt tokens."""
    outputs = list(one.stream(PROMPT, SAMPLING))
    return [token for output in outputs for token in output.tokens], outputs[-1].num_cached


def test_cached_blocks_survive_a_restart(tmp_path: Path) -> None:
    model, folder = save_checkpoint(tmp_path / "model"), str(tmp_path / "kv")
    with llm(model) as plain:
        expected, _ = run_prompt(plain)
    with llm(model, kv_disk=folder) as first:
        assert run_prompt(first) == (expected, 0)
    with llm(model, kv_disk=folder) as second:
        assert run_prompt(second) == (expected, 96)
        tiers = second.engine.status.snapshot().tiers
        assert tiers is not None
        assert tiers.disk_hits == 96


def test_other_weights_under_the_same_name_get_no_hits(tmp_path: Path) -> None:
    folder = str(tmp_path / "kv")
    with llm(save_checkpoint(tmp_path / "model"), kv_disk=folder) as first:
        run_prompt(first)
    shutil.rmtree(tmp_path / "model")
    with llm(save_checkpoint(tmp_path / "model", seed=1), kv_disk=folder) as second:
        assert run_prompt(second)[1] == 0


def test_another_precision_gets_no_hits(tmp_path: Path) -> None:
    model, folder = save_checkpoint(tmp_path / "model"), str(tmp_path / "kv")
    with llm(model, kv_disk=folder) as first:
        run_prompt(first)
    with llm(model, kv_disk=folder, quantization="int8") as second:
        assert run_prompt(second)[1] == 0


def test_two_servers_cannot_share_a_folder(tmp_path: Path) -> None:
    model, folder = save_checkpoint(tmp_path / "model"), str(tmp_path / "kv")
    with llm(model, kv_disk=folder), pytest.raises(InvalidConfig, match="in use by another process"):
        llm(model, kv_disk=folder)
    llm(model, kv_disk=folder).close()


@pytest.fixture
def build_tiers() -> Callable[..., Any]:
    engine = engine_of()
    return lambda **settings: make_tiers(
        EngineConfig(**settings), engine.runner, engine.scheduler.tables, StepClock(), 256
    )


def test_by_default_the_device_is_the_only_tier(tmp_path: Path, build_tiers: Callable[..., Any]) -> None:
    assert build_tiers() is None
    assert build_tiers(kv_host_bytes=0) is None
    engine = build_engine(
        EngineConfig(model=save_checkpoint(tmp_path / "m"), device="cpu", max_model_len=64, kv_tokens=256)
    )
    assert engine.scheduler.tiers is None
    assert engine.status.snapshot().tiers is None


def test_invalid_sizes_are_refused(tmp_path: Path, build_tiers: Callable[..., Any]) -> None:
    with pytest.raises(InvalidConfig, match="is too small"):
        build_tiers(kv_host_bytes=1000)
    with pytest.raises(OutOfMemory, match="set it lower"):
        build_tiers(kv_host_bytes=1 << 60)
    with pytest.raises(InvalidConfig, match=r"kv_disk_bytes .* is too small"):
        build_tiers(kv_disk=str(tmp_path / "kv"), kv_disk_bytes=1000, model=save_checkpoint(tmp_path / "model"))
    assert build_tiers(kv_host_bytes=1 << 20) is not None
