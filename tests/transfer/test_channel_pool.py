from contextlib import closing

import pytest

from paceline.core.errors import InvalidConfig, MissingDependency
from paceline.transfer import nixl as nixl_agent
from paceline.transfer import shared_memory
from paceline.transfer.client import TransferClient
from paceline.transfer.pool import channels_for, pick_channels
from paceline.transfer.server import TransferServer
from paceline.transfer.transfer import ChannelUnavailable, TransferFailed
from paceline.wire.keys import Security, generate_key_pair
from paceline.wire.transfer_messages import TransferHandle
from tests.transfer.transfers import Destination, filled, random_parts


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(nixl_agent, "is_installed", lambda: True)


@pytest.fixture
def not_installed(monkeypatch):
    monkeypatch.setattr(nixl_agent, "is_installed", lambda: False)


def test_the_best_channel_comes_first(installed):
    assert pick_channels(None, None) == ("memory", "nixl", "socket")
    assert pick_channels(["socket", "memory"], None) == ("memory", "socket")


def test_with_keys_nixl_must_be_named(installed):
    security = Security(generate_key_pair())
    assert pick_channels(None, security) == ("memory", "socket")
    assert pick_channels(["nixl", "socket"], security) == ("nixl", "socket")


def test_each_cluster_setting_maps_to_channels(installed):
    security = Security(generate_key_pair())
    assert pick_channels(channels_for("nixl"), security) == ("memory", "nixl", "socket")
    assert pick_channels(channels_for("socket"), None) == ("socket",)
    assert pick_channels(channels_for("auto"), security) == ("memory", "socket")


def test_sockets_are_always_available(not_installed, monkeypatch):
    monkeypatch.setattr(shared_memory, "is_available", lambda: False)
    assert pick_channels(None, None) == ("socket",)
    with pytest.raises(InvalidConfig, match="needs Linux"):
        pick_channels(["memory"], None)


def test_a_named_channel_that_is_not_available_is_an_error(not_installed):
    with pytest.raises(MissingDependency, match=r"pip install 'paceline\[transfer\]'"):
        TransferClient(None, ["nixl"])
    with pytest.raises(MissingDependency, match=r"pip install 'paceline\[transfer\]'"):
        TransferServer("127.0.0.1", None, ["nixl"])
    with pytest.raises(InvalidConfig, match="no transfer channel 'unknown'"):
        pick_channels(["unknown"], None)


def test_the_next_channel_is_used_when_one_does_not_reach_the_server(monkeypatch):
    """Shared memory of another machine and a NIXL that does not start: sockets remain."""

    def fail(purpose):
        raise ChannelUnavailable("NIXL does not start")

    monkeypatch.setattr("paceline.transfer.pool.NixlAgent", fail)
    monkeypatch.setattr(nixl_agent, "is_installed", lambda: True)
    with closing(TransferServer("127.0.0.1", None, ["socket"])) as server:
        handle = server.offer(filled(random_parts()))
        assert handle.addresses.keys() == {"socket"}
        addresses = {**handle.addresses, "memory": "@paceline-elsewhere", "nixl": "UCX", "unknown": "address"}
        remote = TransferHandle(handle.id, addresses, handle.sizes)
        with closing(TransferClient(None)) as client:
            assert Destination(remote).fetch(client, remote).buffers == random_parts()
        with closing(TransferClient(None, ["memory"])) as client, pytest.raises(TransferFailed, match="no such server"):
            Destination(remote).fetch(client, remote)


def test_no_common_channel():
    handle = TransferHandle(bytes(16), {"unknown": "address"}, [1])
    with closing(TransferClient(None)) as client, pytest.raises(TransferFailed, match="the server offers unknown"):
        Destination(handle).fetch(client, handle)


def test_a_server_whose_nixl_does_not_start_still_serves_sockets(monkeypatch):
    if not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed: pip install 'paceline[transfer]'")

    class Broken:
        def __init__(self):
            raise ChannelUnavailable("no UCX here")

    monkeypatch.setattr("paceline.transfer.server.StagingBuffer", Broken)
    with closing(TransferServer("127.0.0.1", None, ["nixl"])) as server:
        handle = server.offer(filled(random_parts()))
        with closing(TransferClient(None, ["nixl", "socket"])) as client:
            assert Destination(handle).fetch(client, handle).buffers == random_parts()
        with closing(TransferClient(None, ["nixl"])) as client, pytest.raises(TransferFailed, match="no UCX here"):
            Destination(handle).fetch(client, handle)
