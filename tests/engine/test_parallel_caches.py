"""Two ranks on the CPU: hand-off from and to one rank, cache tiers, and blocks that have the format of one rank."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.engine.engine import Engine
from paceline.engine.hooks.handoff import CacheLayout
from paceline.kernels.cpu import native
from paceline.models.blocks.kv_blocks import block_bytes, read_blocks, write_blocks
from paceline.models.parallel.runner import ParallelRunner
from paceline.models.runner.runner import Span
from tests.engine.harness import GREEDY, SAMPLED, assert_nothing_held, outputs_of, request, tokens_of
from tests.engine.start.test_build import engine, save_checkpoint
from tests.engine.test_handoff import hand_off
from tests.engine.test_tier_build import PROMPT, llm, run_prompt

LONG = tuple((7 * i + i // 11) % 36 for i in range(150))
OPTIONS = {"speculation": {"enabled": False}, "kv_tokens": 512, "kv_host_bytes": 4 << 20}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def whole(target: str) -> Engine:
    """One rank."""
    return engine(target, **OPTIONS)


@pytest.fixture(scope="module")
def split(target: str) -> Iterator[Engine]:
    """Two ranks."""
    built = engine(target, tensor_parallel_size=2, **OPTIONS)
    try:
        yield built
    finally:
        built.close()
        native.set_num_threads(1)


@pytest.mark.parametrize("direction", ["one rank to two", "two ranks to one"])
def test_a_handed_off_prompt_gives_the_same_text(direction: str, whole: Engine, split: Engine, target: str) -> None:
    assert CacheLayout.of(split.runner) == CacheLayout.of(whole.runner)
    source, decoder = (whole, split) if direction == "one rank to two" else (split, whole)
    for name, sampling in (("greedy", GREEDY), ("seeded", SAMPLED)):
        one = replace(request(name, (len(direction), *LONG), **sampling), cache_salt=name)
        expected = outputs_of(engine(target, **OPTIONS), one)
        steps = decoder.num_steps
        hand_off(source, decoder, one)
        outputs = outputs_of(decoder, one)
        assert tokens_of(outputs, name) == tokens_of(expected, name)
        assert outputs[0].num_cached == 144
        assert decoder.num_steps - steps == len(tokens_of(outputs, name))  # no step for the prompt alone
    assert_nothing_held(decoder)


def test_blocks_that_left_the_device_come_back_from_host_memory(split: Engine, target: str) -> None:
    plain = engine(target, speculation={"enabled": False})
    prompts = [request(f"tier{i}", tuple((i + 5 * j) % 36 for j in range(200)), **SAMPLED) for i in range(4)]
    expected = [tokens_of(outputs_of(plain, one), one.id) for one in prompts]
    for round_number in range(2):  # 4 prompts of 200 tokens, and a cache of 512
        for one, tokens in zip(prompts, expected, strict=True):
            assert tokens_of(outputs_of(split, one), one.id) == tokens, round_number
    tiers = split.status.snapshot().tiers
    assert tiers is not None
    assert tiers.host_hits >= 192
    assert tiers.bytes_to_host % block_bytes(split.runner) == 0


def test_bytes_written_by_rank_0_are_those_that_the_other_rank_reads(split: Engine, whole: Engine) -> None:
    """A sequence continues over blocks of one rank, after its last slots moved."""
    assert isinstance(split.runner, ParallelRunner)
    text = [i * 7 % 36 for i in range(37)]
    rows = [Span([3, 1, 5], 0, text[:32], 0)]
    for one in (whole, split):
        one.runner.forward(rows)
        one.runner.move([17, 18], [60, 55])  # to block 3
    expected = whole.runner.forward([Span([3, 1, 5], 32, text[32:], 5)]).logits
    data = bytearray(2 * block_bytes(whole.runner))
    read_blocks(whole.runner, [3, 1], data)
    split.runner.settle()
    own = bytearray(len(data))
    read_blocks(split.runner, [3, 1], own)
    assert np.allclose(np.frombuffer(own, np.float32), np.frombuffer(data, np.float32), atol=1e-4)
    write_blocks(split.runner, [6, 0], data)
    logits = split.runner.forward([Span([6, 0, 2], 32, text[32:], 5)]).logits
    assert expected is not None
    assert logits is not None
    assert np.allclose(logits.numpy(), expected.numpy(), atol=1e-4)


@pytest.mark.slow
def test_blocks_on_disk_survive_a_restart_with_as_many_ranks(tmp_path: Path, target: str) -> None:
    folder = str(tmp_path / "kv")
    with llm(target) as plain:
        expected, _ = run_prompt(plain)
    with llm(target, kv_disk=folder, tensor_parallel_size=2) as first:
        assert run_prompt(first) == (expected, 0)
    with llm(target, kv_disk=folder, tensor_parallel_size=2) as second:
        assert run_prompt(second) == (expected, len(PROMPT) // 16 * 16)
    with llm(target, kv_disk=folder) as one_rank:  # whose sums round differently
        assert run_prompt(one_rank) == (expected, 0)
    native.set_num_threads(1)
