from contextlib import closing

import pytest

from paceline.core.errors import InvalidConfig, MissingDependency
from paceline.runtime.transfer.channels import nixl_agent, windows
from paceline.runtime.transfer.channels.kinds import kinds_of, pick_kinds
from paceline.runtime.transfer.client import Courier
from paceline.runtime.transfer.errors import KindUnavailable, TransferFailed
from paceline.runtime.transfer.handle import Ticket
from paceline.runtime.transfer.server import Depot
from paceline.runtime.wire.keys import Security, generate
from tests.runtime.transfer.parcels import Taken, filled, parts


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(nixl_agent, "is_installed", lambda: True)


@pytest.fixture
def not_installed(monkeypatch):
    monkeypatch.setattr(nixl_agent, "is_installed", lambda: False)


def test_the_best_come_first(installed):
    assert pick_kinds(None, None) == ("memory", "nixl", "socket")
    assert pick_kinds(["socket", "memory"], None) == ("memory", "socket")


def test_nixl_among_workers_with_keys_only_by_name(installed):
    security = Security(generate())
    assert pick_kinds(None, security) == ("memory", "socket")
    assert pick_kinds(["nixl", "socket"], security) == ("nixl", "socket")


def test_what_a_cluster_says(installed):
    security = Security(generate())
    assert pick_kinds(kinds_of("nixl"), security) == ("memory", "nixl", "socket")
    assert pick_kinds(kinds_of("socket"), None) == ("socket",)
    assert pick_kinds(kinds_of("auto"), security) == ("memory", "socket")


def test_sockets_will_do(not_installed, monkeypatch):
    monkeypatch.setattr(windows, "is_available", lambda: False)
    assert pick_kinds(None, None) == ("socket",)
    with pytest.raises(InvalidConfig, match="needs Linux"):
        pick_kinds(["memory"], None)


def test_a_kind_that_is_not_here_is_an_error_when_asked_for(not_installed):
    with pytest.raises(MissingDependency, match=r"pip install 'paceline\[transfer\]'"):
        Courier(None, ["nixl"])
    with pytest.raises(MissingDependency, match=r"pip install 'paceline\[transfer\]'"):
        Depot("127.0.0.1", None, ["nixl"])
    with pytest.raises(InvalidConfig, match="no transfer by 'pigeon'"):
        pick_kinds(["pigeon"], None)


def test_the_next_kind_when_one_does_not_lead_there(monkeypatch):
    """A window of another machine, and a NIXL that does not start: sockets remain."""

    def fails(purpose):
        raise KindUnavailable("NIXL does not start")

    monkeypatch.setattr("paceline.runtime.transfer.channels.channels.NixlAgent", fails)
    monkeypatch.setattr(nixl_agent, "is_installed", lambda: True)
    with closing(Depot("127.0.0.1", None, ["socket"])) as depot:
        ticket = depot.offer(filled(parts()))
        assert ticket.addresses.keys() == {"socket"}
        addresses = {**ticket.addresses, "memory": "@paceline-elsewhere", "nixl": "UCX", "pigeon": "roof"}
        far = Ticket(ticket.id, addresses, ticket.sizes)
        with closing(Courier(None)) as courier:
            assert Taken(far).fetch(courier, far).places == parts()
        with closing(Courier(None, ["memory"])) as courier, pytest.raises(TransferFailed, match="no such depot"):
            Taken(far).fetch(courier, far)


def test_no_kind_in_common():
    ticket = Ticket(bytes(16), {"pigeon": "roof"}, [1])
    with closing(Courier(None)) as courier, pytest.raises(TransferFailed, match="gives by pigeon"):
        Taken(ticket).fetch(courier, ticket)


def test_nixl_that_the_depot_cannot_start(monkeypatch):
    if not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed: pip install 'paceline[transfer]'")

    class Broken:
        def __init__(self):
            raise KindUnavailable("no UCX here")

    monkeypatch.setattr("paceline.runtime.transfer.serve_loop.Shelf", Broken)
    with closing(Depot("127.0.0.1", None, ["nixl"])) as depot:
        ticket = depot.offer(filled(parts()))
        with closing(Courier(None, ["nixl", "socket"])) as courier:
            assert Taken(ticket).fetch(courier, ticket).places == parts()
        with closing(Courier(None, ["nixl"])) as courier, pytest.raises(TransferFailed, match="no UCX here"):
            Taken(ticket).fetch(courier, ticket)
