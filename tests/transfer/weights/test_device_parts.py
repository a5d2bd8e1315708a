"""Weights copied from the memory of a peer: the same bits, other ways when that fails, and verification."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from paceline.models.loading.load import LoadedModel
from paceline.models.manifest.manifest import ExportedWeights
from paceline.transfer.weights.loader import WeightLoader
from paceline.transfer.weights.server import WeightServer
from paceline.wire.transfer_messages import MemoryRegion
from paceline.wire.worker_spec import PeerAddress
from tests.transfer.fake_memory import FakeMemory, Table
from tests.transfer.weights.test_loader import ANY, assert_same, exported, load_all, loaded, model

__all__ = ["loaded", "model"]  # fixtures


@contextmanager
def serving(weights: ExportedWeights, memory: FakeMemory | None) -> Iterator[WeightServer]:
    server = WeightServer(ANY, None)
    try:
        server.open(weights, memory=memory)
        yield server
    finally:
        server.close()


@contextmanager
def loading(server: WeightServer, memory: FakeMemory | None) -> Iterator[WeightLoader]:
    one = WeightLoader([PeerAddress("peer", server.address)], None, memory_of=lambda device: memory)
    try:
        yield one
    finally:
        one.close()


def test_a_model_is_copied_from_the_memory_of_a_peer(loaded: LoadedModel, model: str) -> None:
    table: Table = {}
    memory = FakeMemory(table)
    with serving(exported(loaded, model), FakeMemory(table)) as server, loading(server, memory) as loader:
        found = load_all(loader, "/nowhere/model")
        assert_same(found, loaded)
        assert server.num_in_place_bytes == server.num_bytes > loaded.model.weight_bytes
        assert memory.num_opened > 1


@pytest.mark.parametrize("case", ["another machine", "no memory of the server", "no memory of the client"])
def test_without_common_memory_the_bytes_are_sent(loaded: LoadedModel, model: str, case: str) -> None:
    own = None if case == "no memory of the server" else FakeMemory({})
    memory = None if case == "no memory of the client" else FakeMemory({})
    with serving(exported(loaded, model), own) as server, loading(server, memory) as loader:
        assert_same(load_all(loader, "/nowhere/model"), loaded)
        assert server.num_bytes > server.num_in_place_bytes == 0


class StaleMemory(FakeMemory):
    """Memory whose bytes have changed since the server computed their checksum."""

    def open(self, region: MemoryRegion) -> torch.Tensor:
        found = super().open(region).clone()
        found[len(found) // 2 :] += 1
        return found


def test_changed_bytes_are_noticed_and_the_model_comes_from_disk(
    loaded: LoadedModel, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    table: Table = {}
    with serving(exported(loaded, model), FakeMemory(table)) as server, loading(server, StaleMemory(table)) as loader:
        assert_same(load_all(loader, model), loaded)
    assert "the checksum differs" in caplog.text
