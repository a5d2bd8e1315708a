"""Two ranks on one GPU, with CUDA graphs on both: the text of one rank, drafts, trees, hand-off from and to one rank, tiers."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.core.request import Request
from paceline.engine.engine import Engine
from paceline.engine.graph import batch as device_batch
from paceline.engine.hooks.handoff import CacheLayout
from paceline.engine.start.build import build_engine
from paceline.models.blocks.kv_blocks import block_bytes
from paceline.models.decoder.forward import DecoderModel
from paceline.models.loading.load import LoadedModel, load_model
from paceline.models.parallel.commands import Command, DeviceMove, DevicePass, Follow, RankSpec
from paceline.models.parallel.gpu import ParallelGpuRunner
from paceline.models.parallel.ranks import Ranks
from paceline.models.parallel.runner import load_parallel
from paceline.models.runner.gpu.runner import GpuRunner
from tests.engine.graph.oracle import OracleProposer
from tests.engine.harness import GREEDY, SAMPLED, assert_nothing_held, outputs_of, request, tokens_of
from tests.engine.start.test_build import save_checkpoint
from tests.engine.test_handoff import hand_off
from tests.exactness.contract import check_contract, differences
from tests.exactness.suite import plain_text
from tests.fakes import draft_model, run, tiny_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")
LONG = tuple((7 * i + i // 11) % 36 for i in range(150))


def on_one_gpu(spec: RankSpec) -> tuple[LoadedModel, Ranks]:
    return load_parallel(replace(spec, shares_device=True))


def built(target: str, **options: Any) -> Engine:
    settings = EngineConfig(
        model=target,
        draft=None,
        device="cuda",
        dtype="float32",
        max_num_seqs=4,
        max_batched_tokens=64,
        kv_tokens=512,
        kv_host_bytes=4 << 20,
        audit_fraction=0.0,
        speculation=SpeculationConfig(enabled=False),
        **options,
    )
    return build_engine(settings, load_ranks=on_one_gpu)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def model(target: str) -> DecoderModel:
    return load_model(target, DEVICE, torch.float32, None).model


@pytest.fixture(scope="module")
def whole(target: str) -> Iterator[Engine]:
    """One rank."""
    one = built(target)
    yield one
    one.close()


@pytest.fixture(scope="module")
def split(target: str) -> Iterator[Engine]:
    """Two ranks."""
    two = built(target, tensor_parallel_size=2)
    assert isinstance(two.runner, ParallelGpuRunner)
    yield two
    close_during_a_step(two)
    assert not dist.is_initialized()


def close_during_a_step(engine: Engine) -> None:
    """No rank ends while the device of another waits for it."""
    assert engine.graph is not None
    engine.add(request("unfinished", LONG[:20], max_tokens=50, **GREEDY))
    while not engine.graph.num_inflight:
        assert engine.has_work
        engine.step()
    engine.close()
    torch.cuda.synchronize()


def text(engine: Engine, *requests: Request) -> dict[tuple[str, int], list[int]]:
    return {(one.id, 0): tokens_of(outputs_of(engine, one), one.id) for one in requests}


def test_the_text_of_one_rank(model: DecoderModel, whole: Engine, split: Engine) -> None:
    assert split.runner.cache[0][0].shape[2] == model.config.num_kv_heads // 2
    requests = [request("greedy", LONG, **GREEDY), request("seeded", LONG[3:], **SAMPLED)]
    found = differences(model, requests, text(whole, *requests), text(split, *requests))
    check_contract(found, is_bitwise=False)
    assert split.graph is not None
    assert split.graph.num_steps > 0


def test_drafts_and_trees_in_the_graphs_of_both_ranks(
    target: str, model: DecoderModel, split: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In caches of their own, with the ranks of the engine above."""
    assert isinstance(split.runner, ParallelGpuRunner)
    share, ranks = split.runner.model, split.runner.ranks
    asked = [request("greedy", LONG[:40], **GREEDY), request("seeded", LONG[3:20], **SAMPLED)]
    plain = plain_text(model, asked)
    launches: dict[str, set[type]] = {"run": set(), "capture": set(), "replay": set()}
    send = ranks.send

    def record(command: Command) -> None:
        if isinstance(command, Follow):
            launches[command.launch].add(type(command.work))
        send(command)

    monkeypatch.setattr(ranks, "send", record)
    drafts = draft_model(load_model(target, DEVICE, torch.float32, None).model, runner=GpuRunner)
    trees = OracleProposer(plain)
    for proposer, depth, shapes in ((drafts, 3, {DevicePass}), (trees, 7, {DevicePass, DeviceMove})):
        if proposer is trees:
            monkeypatch.setattr(device_batch, "make_drafter", trees.drafter)
        kind = partial(ParallelGpuRunner, ranks=ranks)
        engine = tiny_engine(share, proposer, depth, runner_kind=kind, graph_depth=depth)
        result = run(engine, asked)
        check_contract(differences(model, asked, plain, result.tokens), is_bitwise=False)
        assert result.accepted > 3
        assert engine.graph is not None
        assert engine.graph.num_steps > 3
        assert launches["capture"] == launches["replay"] == shapes
        engine.runner.close()  # its cache on the other rank


@pytest.mark.parametrize("direction", ["one rank to two", "two ranks to one"])
def test_a_handed_off_prompt(direction: str, model: DecoderModel, whole: Engine, split: Engine) -> None:
    assert CacheLayout.of(split.runner) == CacheLayout.of(whole.runner)
    source, decoder = (whole, split) if direction == "one rank to two" else (split, whole)
    one = replace(request(direction, (len(direction), *LONG), **SAMPLED), cache_salt=direction)
    expected = text(whole, replace(one, cache_salt="other"))
    hand_off(source, decoder, one)
    outputs = outputs_of(decoder, one)
    assert outputs[0].num_cached == 144
    tokens = {(one.id, 0): tokens_of(outputs, one.id)}
    check_contract(differences(model, [one], expected, tokens), is_bitwise=False)
    assert_nothing_held(decoder)


def test_blocks_that_left_the_device_come_back_from_host_memory(
    model: DecoderModel, whole: Engine, split: Engine
) -> None:
    prompts = [request(f"tier{i}", tuple((i + 5 * j) % 36 for j in range(200)), **SAMPLED) for i in range(4)]
    expected = text(whole, *prompts)
    for _ in range(2):  # 4 prompts of 200 tokens, and a cache of 512
        check_contract(differences(model, prompts, expected, text(split, *prompts)), is_bitwise=False)
    tiers = split.status.snapshot().tiers
    assert tiers is not None
    assert tiers.host_hits >= 192
    assert tiers.bytes_to_host % block_bytes(split.runner) == 0
