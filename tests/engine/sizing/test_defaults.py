from dataclasses import replace
from itertools import product

import pytest

from paceline.core.errors import InvalidConfig
from paceline.engine.sizing.sizing import (
    ACTIVATION_SHARE,
    CPU_SEQUENCES,
    CPU_TOKENS,
    DeviceFacts,
    GivenLimits,
    ModelFacts,
    ResolvedLimits,
    resolve_limits,
)

GB = 10**9
H200 = DeviceFacts("cuda", "NVIDIA H200", 141 * GB, 132)
L4 = DeviceFacts("cuda", "NVIDIA L4", 24 * GB, 58)
CPU = DeviceFacts("cpu", "", 32 * GB, 8)
LLAMA_8B = ModelFacts(
    num_weights=8_030_000_000,
    weight_bytes=16 * GB,
    kv_bytes_per_token=131_072,
    row_bytes=(4 * 4096 + 3 * 14_336) * 2,
    logit_bytes=2 * 128_256 * 4,
    window=8192,
)
LLAMA_70B = replace(
    LLAMA_8B,
    num_weights=70_600_000_000,
    weight_bytes=71 * GB,
    kv_bytes_per_token=327_680,
    row_bytes=(4 * 8192 + 3 * 28_672) * 2,
)
SMALL = ModelFacts(135_000_000, GB // 3, 23_040, (4 * 576 + 3 * 1536) * 2, 2 * 49_152 * 4, 8192)


def resolved(device: DeviceFacts, models: ModelFacts, given: GivenLimits = GivenLimits()) -> ResolvedLimits:  # noqa: B008
    return resolve_limits(device, models, given, int(0.85 * device.memory_bytes))


@pytest.mark.parametrize(
    ("device", "models", "sequences", "tokens", "reason"),
    [
        (H200, LLAMA_8B, 256, 8192, "best measured on GPUs"),
        (H200, SMALL, 256, 8192, "best measured on GPUs"),
        (H200, LLAMA_70B, 256, 2048, "a longer pass would delay decoding"),
        (L4, SMALL, 256, 8192, "best measured on GPUs"),
        (L4, replace(LLAMA_8B, weight_bytes=8 * GB), 128, 4096, "a longer pass would delay decoding"),
        (L4, LLAMA_8B, 32, 2048, "more take too much memory"),
        (CPU, SMALL, CPU_SEQUENCES, CPU_TOKENS, "shortest wait on CPUs"),
        (CPU, LLAMA_8B, CPU_SEQUENCES, CPU_TOKENS, "shortest wait on CPUs"),
    ],
)
def test_limits_by_device_and_model(
    device: DeviceFacts, models: ModelFacts, sequences: int, tokens: int, reason: str
) -> None:
    found = resolved(device, models)
    assert (found.max_num_seqs, found.max_batched_tokens, found.tokens.reason) == (sequences, tokens, reason)


def test_activations_leave_most_memory_to_the_cache() -> None:
    for memory, models in product(range(20, 200, 4), (LLAMA_8B, SMALL)):
        device = DeviceFacts("cuda", "", memory * GB, 132)
        found = resolved(device, models)
        available = 0.85 * memory * GB - models.weight_bytes
        used = found.max_logit_rows * models.logit_bytes + found.max_batched_tokens * models.row_bytes
        if found.max_num_seqs > 8 and found.max_batched_tokens > max(512, found.max_num_seqs):
            assert used <= 2 * ACTIVATION_SHARE * available
            assert available - used > found.max_num_seqs * 400 * models.kv_bytes_per_token


def test_more_memory_never_gives_lower_limits() -> None:
    found = [resolved(DeviceFacts("cuda", "", memory * GB, 132), LLAMA_8B) for memory in range(18, 200)]
    assert [one.max_num_seqs for one in found] == sorted(one.max_num_seqs for one in found)
    assert [one.max_batched_tokens for one in found] == sorted(one.max_batched_tokens for one in found)


def test_a_model_that_does_not_fit_gets_the_lowest_limits() -> None:
    found = resolved(L4, LLAMA_70B)  # the memory fit then says what to do
    assert (found.max_num_seqs, found.max_batched_tokens) == (8, 512)


def test_configured_limits_are_kept() -> None:
    for device in (H200, CPU):
        found = resolved(device, LLAMA_8B, GivenLimits(7, 300, 5))
        assert (found.max_num_seqs, found.max_batched_tokens, found.max_depth) == (7, 300, 5)
        assert {found.sequences.reason, found.tokens.reason, found.depth.reason} == {"configured"}


@pytest.mark.parametrize("device", [H200, CPU])
def test_a_default_follows_the_configured_limit(device: DeviceFacts) -> None:
    few = resolved(device, LLAMA_8B, GivenLimits(max_batched_tokens=16))
    assert (few.max_num_seqs, few.max_batched_tokens) == (16, 16)
    many = resolved(device, LLAMA_8B, GivenLimits(max_num_seqs=9000))
    assert (many.max_num_seqs, many.max_batched_tokens) == (9000, 9000)
    with pytest.raises(InvalidConfig, match=r"max_batched_tokens \(8\) must be at least max_num_seqs \(9\)"):
        resolved(device, LLAMA_8B, GivenLimits(9, 8))


def test_one_sequence_needs_no_more_tokens_than_its_window() -> None:
    found = resolved(H200, replace(LLAMA_8B, window=3000), GivenLimits(max_num_seqs=1))
    assert (found.max_batched_tokens, found.tokens.reason) == (4096, "all prompts at once")


def test_drafts_of_a_step() -> None:
    assert resolved(H200, LLAMA_8B).max_draft_tokens == 512
    assert resolved(H200, LLAMA_8B, GivenLimits(rule="fixed")).max_draft_tokens == 8192
    assert resolved(H200, LLAMA_8B, GivenLimits(max_num_seqs=4, max_batched_tokens=64)).max_draft_tokens == 64
    assert resolved(CPU, SMALL).max_draft_tokens == CPU_TOKENS


def test_rows_with_logits() -> None:
    assert resolved(H200, LLAMA_8B).max_logit_rows == 256 + 512
    assert resolved(H200, LLAMA_8B, GivenLimits(max_num_seqs=4)).max_logit_rows == 4 + 4 * 8
    assert resolved(H200, LLAMA_8B, GivenLimits(rule="fixed")).max_logit_rows == 256 * 9
    assert resolved(H200, LLAMA_8B, GivenLimits(max_num_seqs=64, max_batched_tokens=100)).max_logit_rows == 100


def test_depth() -> None:
    trees = replace(LLAMA_8B, drafts_trees_in_graphs=True)
    assert [resolved(H200, models).max_depth for models in (trees, LLAMA_8B)] == [31, 8]
    assert resolved(CPU, trees).max_depth == 8
    assert resolved(H200, trees, GivenLimits(rule="fixed")).max_depth == 8
    assert resolved(H200, trees, GivenLimits(max_depth=0)).max_depth == 0


def test_every_limit_is_described_with_its_reason() -> None:
    assert str(H200) == "cuda (NVIDIA H200, 141 GB)"
    assert str(CPU) == "cpu (8 cores, 32 GB)"
    assert str(resolved(H200, LLAMA_8B, GivenLimits(max_batched_tokens=1024))) == (
        "256 sequences (best measured on GPUs), 1024 tokens a step (configured), depth up to 8 (default)"
    )


def test_the_published_rules_may_reach_their_published_depth() -> None:
    for rule, most in (("threshold", 10), ("additive", 16), ("goodput", 8), ("fixed", 8)):
        assert resolved(CPU, SMALL, GivenLimits(rule=rule)).max_depth == most
        assert resolved(CPU, SMALL, GivenLimits(max_depth=5, rule=rule)).max_depth == 5
