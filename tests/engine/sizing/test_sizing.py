"""Sizes of engines around models of which only the shape is real."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidConfig, OutOfMemory
from paceline.core.sequence import BLOCK_SIZE
from paceline.engine.sizing import sizing
from paceline.engine.sizing.sizing import DeviceFacts, Sizing, footprint, num_lanes, size_engine
from paceline.models.drafts.load import LoadedHead
from paceline.models.families.spec import DecoderSpec
from tests.engine.sizing.test_memory_fit import GB, LLAMA_1B, required
from tests.fakes import tiny_model
from tests.heads import tiny_eagle, tiny_medusa

DEVICES: dict[str, DeviceFacts] = {
    "cpu": DeviceFacts("cpu", "", 80 * GB, 8),
    "cuda": DeviceFacts("cuda", "NVIDIA H100", 80 * GB, 132),
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "device_facts", lambda device: DEVICES[device.type])


def sized(device: str, draft: Any = None, model: DecoderSpec = LLAMA_1B, **options: Any) -> Sizing:
    """Sizes of an engine around a 1B."""
    weights = SimpleNamespace(dtype=torch.bfloat16, weight_bytes=model.num_parameters * 2)
    loaded: Any = SimpleNamespace(name="1B", config=model, model=weights)
    return size_engine(EngineConfig(**options), loaded, draft, torch.device(device))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_one_slot_is_enough_for_one_full_sequence(device: str) -> None:
    for window in (8192, 250):
        found = sized(device, max_num_seqs=1, max_model_len=window)
        assert found.window == window
        assert found.memory.kv_tokens >= required(window)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kv_tokens_is_taken_at_its_word_or_refused(device: str) -> None:
    assert sized(device, max_model_len=4096, kv_tokens=4112).memory.kv_tokens == 4112
    with pytest.raises(InvalidConfig, match=r"kv_tokens \(4111\).*raise it to 4112 or more"):
        sized(device, max_model_len=4096, kv_tokens=4111)


def test_an_eight_bit_cache_holds_twice_the_tokens() -> None:
    many = {"max_num_seqs": 512, "max_batched_tokens": 512}
    assert sized("cuda", kv_dtype="fp8", **many).memory.kv_tokens // 2 == pytest.approx(
        sized("cuda", **many).memory.kv_tokens, abs=BLOCK_SIZE
    )


def test_cache_on_a_gpu_is_what_the_memory_fraction_leaves() -> None:
    found = sized("cuda")
    assert found.memory.free_bytes < found.memory.kv_bytes_per_token * BLOCK_SIZE
    assert found.description.startswith(
        "limits for cuda (NVIDIA H100, 80 GB): 256 sequences (best measured on GPUs), 8192"
    )
    assert found.description.endswith(f"KV cache {found.memory.kv_tokens:,} tokens (what memory_fraction 0.85 leaves)")


def test_cache_on_a_cpu_is_a_share_of_the_memory() -> None:
    found = sized("cpu")
    assert found.memory.kv_bytes == pytest.approx(0.85 * 80 * GB / 8, rel=0.001)
    assert "limits for cpu (8 cores, 80 GB)" in found.description
    assert "(7.9 GiB)" in found.description
    small = sized("cpu", max_num_seqs=1)
    assert small.description.endswith("KV cache 8,208 tokens (1 sequences of 8192)")
    assert sized("cpu", kv_tokens=9000).description.endswith("KV cache 8,992 tokens (configured)")


def test_largest_pass_counts_as_memory() -> None:
    few, many = (
        sized("cuda", max_num_seqs=4, max_batched_tokens=tokens).memory.activation_bytes for tokens in (512, 8192)
    )
    assert many - few == (8192 - 512) * (4 * 2048 + 3 * 8192) * 2


def test_the_keys_and_values_that_a_long_prompt_gathers_count_beyond_the_feed_forward() -> None:
    limits, gpu = sized("cuda", max_num_seqs=4, max_batched_tokens=512).limits, torch.device("cuda")
    model = SimpleNamespace(dtype=torch.bfloat16, weight_bytes=0)
    loaded: Any = SimpleNamespace(name="1B", config=LLAMA_1B, model=model)
    feed_forward, gathered = 512 * 3 * LLAMA_1B.ffn_size * 2, 2 * LLAMA_1B.num_kv_heads * LLAMA_1B.head_dim * 2
    windows = 2048, feed_forward // gathered, 100_000
    short, even, long = (footprint(loaded, EngineConfig(), limits, gpu, w).activation_bytes for w in windows)
    assert short == even
    assert long - short == 100_000 * gathered - feed_forward


def test_the_memory_of_heads() -> None:
    target, config = tiny_model(), EngineConfig()
    limits, cpu = sized("cpu").limits, torch.device("cpu")
    eagle = footprint(LoadedHead("head", tiny_eagle(target)), config, limits, cpu, 8192)
    assert eagle.kv_bytes_per_token == 2 * 2 * 16 * 4
    assert eagle.weight_bytes > 0
    assert eagle.activation_bytes > num_lanes(limits.max_num_seqs) * 32 * eagle.kv_bytes_per_token
    medusa = footprint(LoadedHead("heads", tiny_medusa(target)), config, limits, cpu, 8192)
    assert (medusa.kv_bytes_per_token, medusa.activation_bytes) == (0, 0)


def test_trees_in_graph_steps_are_deeper() -> None:
    eagle, medusa = (LoadedHead("head", make(tiny_model())) for make in (tiny_eagle, tiny_medusa))
    assert [sized("cuda", head).limits.max_depth for head in (eagle, medusa, None)] == [31, 8, 8]
    assert sized("cpu", eagle).limits.max_depth == 8


@pytest.mark.parametrize(
    ("device", "gigabytes", "window"),
    [("cpu", 80, 131_072), ("cpu", 24, 65_536), ("cpu", 8, 16_384), ("cuda", 80, 131_072), ("cuda", 8, 65_536)],
)
def test_the_window_is_the_models_own_if_its_cache_fits(
    device: str, gigabytes: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEVICES, device, replace(DEVICES[device], memory_bytes=gigabytes * GB))
    long = replace(LLAMA_1B, max_position=131_072)
    found = sized(device, model=long)
    assert found.window == window
    assert found.memory.kv_tokens >= required(window)
    if device == "cpu":
        assert sized(device, model=long, max_model_len=40_000).window == 40_000
        assert found.memory.kv_bytes <= max(GB * 1.08, gigabytes * GB * 0.85 / 8)


def test_a_window_that_would_leave_less_than_the_smallest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "cuda", replace(DEVICES["cuda"], memory_bytes=3 * GB))
    with pytest.raises(OutOfMemory, match="one full sequence needs 82"):
        sized("cuda")
