"""Blocks read in place from another worker's cache: the same text, bytes where that is impossible, and no stale block."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.engine.hooks.handoff import KvImports, NumberPart, PromptImport, pack_numbers, unpack_numbers
from paceline.models.blocks.kv_blocks import HeadShare, copy_blocks, planes
from paceline.transfer.transfer import ChannelUnavailable, TransferFailed
from paceline.wire.transfer_messages import MemoryRegion
from paceline.worker.handoff.memory import PeerCaches, share_cache
from tests.engine.harness import MODEL, engine_of, tokens_of
from tests.fakes import tiny_engine, tiny_model
from tests.heads import eagle
from tests.processes.target_harness import StreamReader, until
from tests.transfer.fake_memory import FakeMemory, Table
from tests.worker.handoff.test_handoffs import (
    EXPECTED,
    REQUESTS,
    PrefillWorker,
    Target,
    assert_all_released,
    split_cluster,
)


def pair() -> tuple[FakeMemory, FakeMemory]:
    """Memories of a target and of a prefill worker on one machine."""
    table: Table = {}
    return FakeMemory(table), FakeMemory(table)


def test_the_text_is_the_same_and_the_blocks_are_copied_in_place() -> None:
    memory, other = pair()
    target, prefill_worker = Target("t", memory=memory), PrefillWorker("p", memory=other)
    with split_cluster(target, prefill_worker) as pool:
        for one in REQUESTS:
            outputs = StreamReader(pool, one).read_all()
            assert tokens_of(outputs, one.id) == EXPECTED[one.id, 0][0]
        counts = target.handoffs.counts()
        assert (counts.done, counts.failed) == (4, 0)
        assert counts.in_place_bytes == counts.bytes > 0
        until(lambda: prefill_worker.service.counts().done == 4)
        assert prefill_worker.service.counts().in_place_bytes == counts.bytes
        assert_all_released(target, prefill_worker)


@pytest.mark.parametrize("case", ["another machine", "no memory of the source", "no memory of the target"])
def test_without_common_memory_the_bytes_are_sent(case: str) -> None:
    target = Target("t", memory=None if case == "no memory of the target" else FakeMemory({}))
    prefill_worker = PrefillWorker("p", memory=None if case == "no memory of the source" else FakeMemory({}))
    with split_cluster(target, prefill_worker) as pool:
        outputs = StreamReader(pool, REQUESTS[0]).read_all()
        assert tokens_of(outputs, "greedy") == EXPECTED["greedy", 0][0]
        counts = target.handoffs.counts()
        assert (counts.done, counts.failed, counts.in_place_bytes) == (1, 0, 0)


def test_hidden_states_of_a_head_come_with_blocks_in_place() -> None:
    memory, other = pair()
    model = tiny_model()
    target = Target("t", engine_of(eagle(model), tokenizer=True), memory=memory)
    prefill_worker = PrefillWorker("p", memory=other)
    with split_cluster(target, prefill_worker) as pool:
        outputs = StreamReader(pool, REQUESTS[0]).read_all()
        assert tokens_of(outputs, "greedy") == EXPECTED["greedy", 0][0]
        assert target.handoffs.counts().in_place_bytes > 0


def test_blocks_of_a_transfer_that_was_withdrawn_meanwhile_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker ends the job after the target has copied, and before the target has asked whether the blocks were intact."""
    memory, other = pair()
    target, prefill_worker = Target("t", memory=memory), PrefillWorker("p", memory=other)
    finish: Callable[[PromptImport], None] = PromptImport.finish

    def withdraw_first(incoming: PromptImport) -> None:
        finish(incoming)
        for job in list(prefill_worker.service._jobs.values()):
            assert job.handle is not None
            prefill_worker.service._server.withdraw(job.handle)

    with split_cluster(target, prefill_worker) as pool:
        monkeypatch.setattr(PromptImport, "finish", withdraw_first)
        outputs = StreamReader(pool, REQUESTS[0]).read_all()
        assert tokens_of(outputs, "greedy") == EXPECTED["greedy", 0][0]
        counts = target.handoffs.counts()
        assert (counts.done, counts.failed, counts.bytes) == (0, 1, 0)
        assert_all_released(target, prefill_worker)


class BrokenLater(FakeMemory):
    """Memory whose handles can be opened once."""

    def open(self, region: MemoryRegion) -> Tensor:
        if self.num_opened:
            raise ChannelUnavailable("the driver refuses it")
        return super().open(region)


def test_after_a_failed_mapping_the_worker_is_asked_for_bytes() -> None:
    table: Table = {}
    runner = tiny_engine(MODEL).runner
    regions = share_cache(runner, FakeMemory(table))
    caches = PeerCaches(runner, BrokenLater(table))
    assert caches.can_open(regions[0])
    with pytest.raises(TransferFailed, match="the driver refuses it"):
        caches.open(regions)
    assert not caches.can_open(regions[0])


def test_a_prompt_whose_cache_cannot_be_mapped_is_computed_here() -> None:
    table: Table = {}
    target, prefill_worker = Target("t", memory=BrokenLater(table)), PrefillWorker("p", memory=FakeMemory(table))
    with split_cluster(target, prefill_worker) as pool:
        outputs = StreamReader(pool, REQUESTS[0]).read_all()
        assert tokens_of(outputs, "greedy") == EXPECTED["greedy", 0][0]
        counts = target.handoffs.counts()
        assert (counts.done, counts.failed) == (0, 1)


def test_a_cache_is_opened_only_with_the_expected_layout() -> None:
    memory, other = pair()
    runner = tiny_engine(MODEL).runner
    regions = share_cache(runner, other)
    caches = PeerCaches(runner, memory)
    found = caches.open(regions)
    assert all(torch.equal(one, plane) for one, plane in zip(found, planes(runner), strict=True))
    assert caches.open(regions) is found
    with pytest.raises(TransferFailed, match="another layout"):
        caches.open(regions[:-1])
    with pytest.raises(TransferFailed, match="another layout"):
        caches.open([MemoryRegion(one.process, one.handle, 0, one.size - 1) for one in regions])
    assert not caches.can_open(None)
    assert not PeerCaches(runner, None).can_open(regions[0])


def test_block_numbers() -> None:
    assert unpack_numbers(pack_numbers([3, 0, 7]), 8) == [3, 0, 7]
    for wrong in ([8], [-1]):
        with pytest.raises(ValueError, match="invalid block numbers"):
            unpack_numbers(pack_numbers(wrong), 8)


def test_blocks_are_divided_among_the_shares_of_ranks() -> None:
    generator = torch.Generator().manual_seed(1)
    sources = [torch.randint(256, (6, BLOCK_SIZE, 24), dtype=torch.uint8, generator=generator) for _ in range(4)]

    def empty(count: int) -> list[Tensor]:
        return [torch.zeros(9, BLOCK_SIZE, 24 // count, dtype=torch.uint8) for _ in sources]

    def copied(shares: Sequence[HeadShare]) -> list[Tensor]:
        copy_blocks(sources, [5, 0, 2], shares, [1, 8, 4])
        return [torch.cat([share.planes[i] for share in shares], 2) for i in range(len(sources))]

    whole = copied([HeadShare(empty(1), [])])
    assert all(torch.equal(plane[[1, 8, 4]], source[[5, 0, 2]]) for plane, source in zip(whole, sources, strict=True))
    twice = [HeadShare(empty(2), [empty(2)]) for _ in range(2)]
    assert all(map(torch.equal, copied(twice), whole))
    for share in twice:
        assert all(map(torch.equal, share.planes, share.copies[0]))


def test_numbers_beyond_the_cache_of_the_source_are_refused() -> None:
    memory, other = pair()
    engine = tiny_engine(MODEL)
    incoming = engine.hooks.get(KvImports).reserve("r", REQUESTS[0].prompt_ids, "")
    assert incoming is not None
    caches = PeerCaches(engine.runner, memory)
    sources = caches.open(share_cache(tiny_engine(MODEL).runner, other))
    with pytest.raises(ValueError, match="invalid block numbers"):
        incoming.copy(NumberPart(0, 1), pack_numbers([10**6]), sources)
    engine.hooks.get(KvImports).release(incoming)
