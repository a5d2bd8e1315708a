"""Cache tiers below the device change the speed, never the text."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.sequence import BLOCK_SIZE
from paceline.engine.engine import Engine
from paceline.kv.prefix import PrefixSums
from paceline.models.blocks.kv_blocks import block_bytes
from paceline.policy.routing.kv_index import KvIndex
from paceline.speculation.proposers.suffix import SuffixProposer
from tests.engine.harness import assert_nothing_held, engine_of, outputs_of, request, tokens_of
from tests.engine.tiered import GatedFolder, assert_nothing_leased, folder_of, store_of, tiered
from tests.fakes import StepClock, draft_model, tiny_model
from tests.heads import LayerSkip, eagle

PROMPTS = [tuple((i * 7 + j * j * (i + 1)) % 40 for j in range(100)) for i in range(4)]
"""Prompts of six full blocks each; the device holds two of them and their outputs."""
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.9, "seed": 5}}
DRAFTS: dict[str, Callable[[], Any]] = {
    "plain": lambda: None,
    "draft model": lambda: draft_model(tiny_model(perturb=0.3)),
    "eagle": lambda: eagle(tiny_model()),
    "layer skip": lambda: LayerSkip(1),
    "suffix": SuffixProposer,
}


@pytest.fixture
def engines() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(*arguments: Any, **options: Any) -> Engine:
        made.append(tiered(*arguments, **options))
        return made[-1]

    yield make
    for engine in made:
        folder = folder_of(engine)
        if isinstance(folder, GatedFolder):
            folder.gate.set()
        engine.close()


def run_prompts(engine: Engine, **sampling: Any) -> list[list[int]]:
    """Outputs of the prompts, run one after the other; each evicts earlier ones."""
    return [tokens_of(outputs_of(engine, request("r", prompt, max_tokens=12, **sampling))) for prompt in PROMPTS]


def tier_counts(engine: Engine) -> Any:
    return engine.status.snapshot().tiers


def until_saved(engine: Engine) -> None:
    while engine.hooks.has_idle_work or store_of(engine).num_unwritten:
        engine.hooks.use_idle_time()


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_text_is_the_same_from_every_tier(
    engines: Callable[..., Engine], tmp_path: Path, draft: str, sampling: str
) -> None:
    plain = run_prompts(engine_of(), **SAMPLINGS[sampling])
    engine = engines(tmp_path, DRAFTS[draft]())
    assert run_prompts(engine, **SAMPLINGS[sampling]) == plain
    assert run_prompts(engine, **SAMPLINGS[sampling]) == plain
    assert tier_counts(engine).host_hits == 4 * 6 * BLOCK_SIZE
    assert_nothing_leased(engine)
    engine.close()
    again = engines(tmp_path, DRAFTS[draft]())
    assert run_prompts(again, **SAMPLINGS[sampling]) == plain
    assert tier_counts(again).disk_hits == 4 * 6 * BLOCK_SIZE
    assert_nothing_leased(again)


def test_many_requests_with_small_tiers(engines: Callable[..., Engine], tmp_path: Path) -> None:
    """Blocks move between tiers while sequences preempt each other, and disk and host overflow."""
    requests = [request(f"r{i}", PROMPTS[i % 4][: 20 + 5 * i], max_tokens=50, temperature=0.8) for i in range(8)]
    plain = [tokens_of(outputs_of(engine_of(), one), one.id) for one in requests]
    size = block_bytes(engine_of().runner)
    engine = engines(tmp_path, draft_model(tiny_model(perturb=0.3)), slots=12, disk_bytes=20 * (size + 4096))
    for _ in range(2):
        outputs = outputs_of(engine, *requests)
        assert [tokens_of(outputs, one.id) for one in requests] == plain
        assert_nothing_leased(engine)
    assert engine.scheduler.num_preemptions > 0
    assert tier_counts(engine).host_blocks <= 12
    assert tier_counts(engine).disk_blocks <= 20
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 20 * (size + 4096)
    assert tier_counts(engine).host_hits + tier_counts(engine).disk_hits > 0


def test_a_preempted_sequence_finds_its_blocks_in_lower_tiers(engines: Callable[..., Engine]) -> None:
    requests = [request(f"r{i}", PROMPTS[i], max_tokens=100, temperature=0.0) for i in range(2)]
    plain = [tokens_of(outputs_of(engine_of(), one), one.id) for one in requests]
    engine = engines(slots=64, max_batched_tokens=128)
    outputs = outputs_of(engine, *requests)
    assert [tokens_of(outputs, one.id) for one in requests] == plain
    assert engine.scheduler.num_preemptions > 0
    assert tier_counts(engine).host_hits > 0


def test_only_the_sequence_that_needs_the_disk_waits(engines: Callable[..., Engine], tmp_path: Path) -> None:
    first = engines(tmp_path)
    plain = run_prompts(first)
    first.close()
    engine = engines(tmp_path, kind=GatedFolder)
    folder = folder_of(engine)
    engine.add(request("slow", PROMPTS[0], max_tokens=12))
    assert folder.reading.wait(30)
    engine.add(request("quick", (1, 2, 3), max_tokens=10))
    quick: list[int] = []
    while len(quick) < 10:
        outputs = engine.step()
        assert tokens_of(outputs, "slow") == []
        quick += tokens_of(outputs, "quick")
    folder.gate.set()
    assert tokens_of(outputs_of(engine), "slow") == plain[0]
    assert tier_counts(engine).disk_hits == 6 * BLOCK_SIZE
    assert folder.threads == {"paceline-tiers"}


def test_a_sequence_waits_no_longer_than_computing_takes(engines: Callable[..., Engine], tmp_path: Path) -> None:
    first = engines(tmp_path)
    plain = run_prompts(first)
    first.close()
    engine = engines(tmp_path, kind=GatedFolder, clock=StepClock())  # every call of now() advances it by a millisecond
    store_of(engine).rates.observe_compute(1000, 1.0)
    outputs = outputs_of(engine, request("r", PROMPTS[0], max_tokens=12))
    assert tokens_of(outputs) == plain[0]
    assert tier_counts(engine).disk_hits == 0
    assert not folder_of(engine).gate.is_set()


def test_a_disk_slower_than_computing_is_not_used(engines: Callable[..., Engine], tmp_path: Path) -> None:
    first = engines(tmp_path)
    plain = run_prompts(first)
    first.close()
    engine = engines(tmp_path, kind=GatedFolder)
    store_of(engine).rates.observe_compute(1000, 0.1)
    store_of(engine).rates.observe_load("disk", 1000, 1.0)
    assert tokens_of(outputs_of(engine, request("r", PROMPTS[0], max_tokens=12))) == plain[0]
    assert not folder_of(engine).reading.is_set()


def test_a_request_cancelled_during_its_fetch(engines: Callable[..., Engine], tmp_path: Path) -> None:
    first = engines(tmp_path)
    plain = run_prompts(first)
    first.close()
    engine = engines(tmp_path, kind=GatedFolder)
    engine.add(request("r", PROMPTS[0], max_tokens=12))
    engine.add(request("s", PROMPTS[1], max_tokens=12))  # waits behind the other
    assert folder_of(engine).reading.wait(30)
    engine.cancel("r")
    engine.cancel("s")
    folder_of(engine).gate.set()
    assert not engine.has_work
    assert run_prompts(engine) == plain
    assert_nothing_held(engine)
    assert_nothing_leased(engine)


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "gone"])
def test_a_damaged_block_is_computed_again(engines: Callable[..., Engine], tmp_path: Path, damage: str) -> None:
    first = engines(tmp_path)
    plain = run_prompts(first)
    first.close()
    engine = engines(tmp_path)  # the headers are read here
    for path in tmp_path.glob("*/*.kv"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes({"flipped": data, "cut": data[:-100], "empty": b""}[damage])
    assert run_prompts(engine) == plain
    assert tier_counts(engine).disk_hits == 0
    assert tier_counts(engine).bad_blocks >= 4


def test_blocks_of_other_weights_are_never_used(engines: Callable[..., Engine], tmp_path: Path) -> None:
    first = engines(tmp_path)
    plain = run_prompts(first)
    first.close()
    engine = engines(tmp_path, weights="retrained")
    assert tier_counts(engine).disk_blocks == 0
    assert run_prompts(engine) == plain
    assert tier_counts(engine).disk_hits == 0


def test_blocks_of_the_device_survive_a_restart(engines: Callable[..., Engine], tmp_path: Path) -> None:
    first = engines(tmp_path)
    outputs_of(first, request("r", PROMPTS[0], max_tokens=4))
    assert (tier_counts(first).host_blocks, tier_counts(first).disk_blocks) == (0, 0)
    first.close()
    engine = engines(tmp_path)
    outputs = outputs_of(engine, request("r", PROMPTS[0], max_tokens=4))
    assert outputs[-1].num_cached == 6 * BLOCK_SIZE


def test_an_idle_engine_saves_blocks_and_a_crash_loses_none(engines: Callable[..., Engine], tmp_path: Path) -> None:
    first = engines(tmp_path)
    outputs_of(first, request("r", PROMPTS[0], max_tokens=4))
    assert first.hooks.has_idle_work
    until_saved(first)
    assert tier_counts(first).disk_blocks == 6
    folder_of(first).close()  # as the kernel does for a killed process
    engine = engines(tmp_path)
    assert tier_counts(engine).disk_blocks == 6


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_tenant_never_hits_blocks_of_another(engines: Callable[..., Engine], tmp_path: Path, tier: str) -> None:
    def cached(engine: Engine, salt: str) -> int:
        return outputs_of(engine, replace(request("r", PROMPTS[0], max_tokens=4), cache_salt=salt))[-1].num_cached

    engine = engines(tmp_path)
    assert cached(engine, "alice") == 0
    if tier == "host":
        for prompt in PROMPTS[1:]:
            outputs_of(engine, request("r", prompt, max_tokens=4))
        assert engine.scheduler.tables.find(PROMPTS[0], "alice") == ([], [])
    elif tier == "disk":
        engine.close()
        engine = engines(tmp_path)
    before = tier_counts(engine)
    assert cached(engine, "bob") == 0
    assert cached(engine, "") == 0
    assert tier_counts(engine).host_hits + tier_counts(engine).disk_hits == before.host_hits + before.disk_hits
    assert cached(engine, "alice") == 6 * BLOCK_SIZE


def test_events_give_the_tier_of_every_block(engines: Callable[..., Engine], tmp_path: Path) -> None:
    engine, index = engines(tmp_path, slots=16), KvIndex(PrefixSums(3))
    engine.listen(lambda event: index.apply("w", event))
    run_prompts(engine)
    until_saved(engine)
    for prompt in PROMPTS:
        held = len(engine.scheduler.tables.find(prompt, "")[0]) * BLOCK_SIZE
        match = index.match(prompt)
        assert match.groups == [(6 * BLOCK_SIZE, [0])] or list(match.groups[0][1]) == [0]
        assert match.groups[0][0] == 6 * BLOCK_SIZE
        assert match.lower.get(0, (held, 0, 0))[0] == held
    assert index.num_orphans == 0
    engine.close()
    again, fresh = engines(tmp_path), KvIndex(PrefixSums(3))
    again.listen(lambda event: fresh.apply("w", event))
    assert [fresh.match(prompt).lower[0] for prompt in PROMPTS] == [(0, 0, 6 * BLOCK_SIZE)] * 4
    assert fresh.num_orphans == 0


def test_a_long_prompt_is_saved_through_a_small_host_tier(engines: Callable[..., Engine], tmp_path: Path) -> None:
    engine, index = engines(tmp_path, slots=6), KvIndex(PrefixSums(3))
    engine.listen(lambda event: index.apply("w", event))
    prompt = [j * j % 40 for j in range(220)]
    outputs_of(engine, request("r", prompt, max_tokens=4))
    until_saved(engine)
    assert tier_counts(engine).disk_blocks == 13
    assert index.match(prompt).groups[0][0] == 13 * BLOCK_SIZE
    for other in PROMPTS:
        outputs_of(engine, request("r", other, max_tokens=4))
    until_saved(engine)
    assert index.match(prompt).groups[0][0] == 13 * BLOCK_SIZE
    assert index.match(prompt).lower[0][0] == len(engine.scheduler.tables.find(prompt, "")[0]) * BLOCK_SIZE
    assert index.num_orphans == 0


def test_without_a_disk_there_is_no_thread_and_nothing_to_save(engines: Callable[..., Engine]) -> None:
    engine = engines()
    plain = run_prompts(engine_of())
    assert run_prompts(engine) == run_prompts(engine) == plain
    assert not engine.hooks.has_idle_work
    assert tier_counts(engine).host_hits > 0
    assert store_of(engine)._thread is None
