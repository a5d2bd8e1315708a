"""From settings to tiers, as a person gives them: a model on disk, a folder for blocks, a restart."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidConfig, OutOfMemory
from paceline.core.sampling import SamplingParams
from paceline.engine.build import build_engine
from paceline.engine.hooks.tier_build import make_tiers
from paceline.engine.llm import LLM
from tests.engine.harness import engine_of
from tests.engine.test_build import save_checkpoint
from tests.fakes import StepClock

PROMPT = [i * i % 35 for i in range(100)]
SAMPLING = SamplingParams(max_tokens=8, temperature=0.9, seed=4, ignore_eos=True)


def llm(model: str, **settings: Any) -> LLM:
    return LLM(model, max_model_len=256, kv_tokens=512, device="cpu", speculation={"enabled": False}, **settings)


def answer(one: LLM) -> tuple[list[int], int]:
    """Its tokens, and how many of the prompt's were cached."""
    outputs = list(one.stream(PROMPT, SAMPLING))
    return [token for output in outputs for token in output.tokens], outputs[-1].num_cached


def test_a_conversation_survives_a_restart(tmp_path: Path) -> None:
    model, folder = save_checkpoint(tmp_path / "model"), str(tmp_path / "kv")
    with llm(model) as plain:
        expected, _ = answer(plain)
    with llm(model, kv_disk=folder) as first:
        assert answer(first) == (expected, 0)
    with llm(model, kv_disk=folder) as second:
        assert answer(second) == (expected, 96)
        tiers = second.engine.snapshot().tiers
        assert tiers is not None
        assert tiers.disk_hits == 96


def test_other_weights_under_the_same_name_find_nothing(tmp_path: Path) -> None:
    folder = str(tmp_path / "kv")
    with llm(save_checkpoint(tmp_path / "model"), kv_disk=folder) as first:
        answer(first)
    shutil.rmtree(tmp_path / "model")
    with llm(save_checkpoint(tmp_path / "model", seed=1), kv_disk=folder) as second:
        assert answer(second)[1] == 0


def test_other_precision_finds_nothing(tmp_path: Path) -> None:
    model, folder = save_checkpoint(tmp_path / "model"), str(tmp_path / "kv")
    with llm(model, kv_disk=folder) as first:
        answer(first)
    with llm(model, kv_disk=folder, quantization="int8") as second:
        assert answer(second)[1] == 0


def test_two_servers_cannot_share_a_folder(tmp_path: Path) -> None:
    model, folder = save_checkpoint(tmp_path / "model"), str(tmp_path / "kv")
    with llm(model, kv_disk=folder), pytest.raises(InvalidConfig, match="in use by another process"):
        llm(model, kv_disk=folder)
    llm(model, kv_disk=folder).close()


@pytest.fixture
def made() -> Callable[..., Any]:
    engine = engine_of()
    return lambda **settings: make_tiers(
        EngineConfig(**settings), engine.runner, engine.scheduler.tables, StepClock(), 256
    )


def test_by_default_the_device_is_the_only_tier(tmp_path: Path, made: Callable[..., Any]) -> None:
    assert made() is None
    assert made(kv_host_bytes=0) is None
    engine = build_engine(
        EngineConfig(model=save_checkpoint(tmp_path / "m"), device="cpu", max_model_len=64, kv_tokens=256)
    )
    assert engine.scheduler.tiers is None
    assert engine.snapshot().tiers is None


def test_what_does_not_fit_the_model_is_refused(tmp_path: Path, made: Callable[..., Any]) -> None:
    with pytest.raises(InvalidConfig, match="is too little"):
        made(kv_host_bytes=1000)
    with pytest.raises(InvalidConfig, match="tensor_parallel_size"):
        made(kv_host_bytes=1 << 20, tensor_parallel_size=2)
    with pytest.raises(OutOfMemory, match="set it lower"):
        made(kv_host_bytes=1 << 60)
    with pytest.raises(InvalidConfig, match=r"kv_disk_bytes .* is too little"):
        made(kv_disk=str(tmp_path / "kv"), kv_disk_bytes=1000, model=save_checkpoint(tmp_path / "model"))
    assert made(kv_host_bytes=1 << 20) is not None
