"""The figures of a Llama-70B are the reference: 80 layers, 8 key-value heads of 128, FP16."""

import re

import pytest

from paceline.core.errors import OutOfMemory
from paceline.core.machine import GIB
from paceline.core.request import SamplingParams, SpeculationParams
from paceline.core.sequence import BLOCK_SIZE, Sequence
from paceline.engine.scheduler import Scheduler
from paceline.engine.sizing.sizing import ModelFootprint, memory_fit
from paceline.kv.block_tables import BlockTables
from paceline.models.families.flat import flat_spec
from paceline.models.families.spec import DecoderSpec
from tests.specs import changed

GB = 10**9
LLAMA_70B = flat_spec(
    architecture="llama",
    vocab_size=128_256,
    hidden_size=8192,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=28_672,
    rms_eps=1e-5,
    rope_theta=500_000.0,
    max_position=8192,
)
LLAMA_1B = changed(
    LLAMA_70B, hidden_size=2048, num_layers=16, num_heads=32, head_dim=64, ffn_size=8192, tie_embeddings=True
)


def footprint(config: DecoderSpec, weight_width: float = 2, kv_width: int = 2, activations: int = 0) -> ModelFootprint:
    weights = int(config.num_parameters * weight_width)
    return ModelFootprint(
        "70B" if config is LLAMA_70B else "1B", weights, config.kv_bytes_per_token(kv_width), activations
    )


def test_cache_of_a_70b() -> None:
    per_token = footprint(LLAMA_70B).kv_bytes_per_token
    assert per_token == 2 * 80 * 8 * 128 * 2 == 327_680
    assert per_token * 4096 == 1_342_177_280
    assert round(per_token * 4096 / GB, 2) == 1.34


def test_weights_of_a_70b() -> None:
    assert LLAMA_70B.num_parameters == 70_553_706_496
    assert round(footprint(LLAMA_70B, 2).weight_bytes / GB) == 141
    assert round(footprint(LLAMA_70B, 1).weight_bytes / GB) == 71  # INT8: not 40


def test_depth_five_for_256_sequences() -> None:
    """1,280 slots are drafted into; packed they are 80 blocks, 419 MB of a 70B."""
    part = Scheduler(BlockTables(2 * 256, prefix_caching=False), 256, 2048)
    for i in range(256):
        part.add(Sequence(i, f"r{i}", [i], 1, SamplingParams(), SpeculationParams(), seed=0, depth=5))
    plan = part.schedule()
    slots = sum(item.num_draft for item in plan.items)
    assert len(plan.items) == 256
    assert slots == 1280
    assert slots // BLOCK_SIZE == 80
    assert slots * footprint(LLAMA_70B).kv_bytes_per_token == 419_430_400


def test_both_models_and_both_caches_share_the_budget() -> None:
    target, draft = footprint(LLAMA_70B, 1, activations=2 * GB), footprint(LLAMA_1B, 2, activations=GB // 2)
    fit = memory_fit(target, draft, 80 * GB, wanted_tokens=10**9, required_tokens=8208)
    assert fit.weight_bytes == target.weight_bytes + draft.weight_bytes
    assert fit.activation_bytes == 2 * GB + GB // 2
    assert fit.kv_bytes_per_token == 327_680 + 32_768
    assert fit.kv_tokens % BLOCK_SIZE == 0
    assert fit.num_blocks == fit.kv_tokens // BLOCK_SIZE
    assert fit.weight_bytes + fit.activation_bytes + fit.kv_bytes + fit.free_bytes == 80 * GB
    assert 0 <= fit.free_bytes < BLOCK_SIZE * fit.kv_bytes_per_token  # not another block would fit


def test_a_draft_costs_cache() -> None:
    target, draft = footprint(LLAMA_70B, 1), footprint(LLAMA_1B, 2)
    alone = memory_fit(target, None, 80 * GB, 10**9, 4112)
    together = memory_fit(target, draft, 80 * GB, 10**9, 4112)
    assert together.kv_tokens < alone.kv_tokens


def test_no_more_than_wanted() -> None:
    fit = memory_fit(footprint(LLAMA_1B), None, 80 * GB, wanted_tokens=10_000, required_tokens=100)
    assert fit.kv_tokens == 10_000
    assert fit.free_bytes > 70 * GB


def test_exactly_enough_fits_and_a_byte_less_does_not() -> None:
    model = ModelFootprint("m", weight_bytes=1000, kv_bytes_per_token=10, activation_bytes=100)
    enough = 1000 + 100 + 10 * 64
    assert memory_fit(model, None, enough, 10**6, 64).kv_tokens == 64
    with pytest.raises(OutOfMemory):
        memory_fit(model, None, enough - 1, 10**6, 64)


def test_weights_alone_too_large() -> None:
    with pytest.raises(
        OutOfMemory, match=r"70B do not fit.*room for 0 tokens.*smaller or more strongly quantised model"
    ):
        memory_fit(footprint(LLAMA_70B), None, 80 * GIB, 10**6, 4112)


def test_a_draft_that_does_not_fit_is_named_and_may_be_left_out() -> None:
    with pytest.raises(OutOfMemory, match=r"70B and 1B do not fit.*leave out the draft"):
        memory_fit(footprint(LLAMA_70B, 1), footprint(LLAMA_1B), 72 * GB, 10**6, 4112)


def test_the_advised_length_fits_and_a_longer_one_does_not() -> None:
    model = ModelFootprint("m", weight_bytes=0, kv_bytes_per_token=GIB // 1000, activation_bytes=0)
    with pytest.raises(OutOfMemory, match="max_model_len") as error:
        memory_fit(model, None, GIB, 10**6, required(4096))
    advised = int(re.findall(r"max_model_len to (\d+)", str(error.value))[0])
    memory_fit(model, None, GIB, 10**6, required(advised))
    with pytest.raises(OutOfMemory):
        memory_fit(model, None, GIB, 10**6, required(advised + 1))


def required(window: int) -> int:
    return -(-window // BLOCK_SIZE) * BLOCK_SIZE + BLOCK_SIZE
