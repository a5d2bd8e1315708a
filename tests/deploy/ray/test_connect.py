"""A wrong address of a Ray cluster is one line within seconds. `tests/processes/test_ray.py` connects to a Ray head."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray

from paceline.core.cluster_config import cluster_config
from paceline.core.errors import PacelineError
from paceline.deploy.ray import deployment

POOL = {"name": "target", "role": "target", "model": "m"}
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@contextmanager
def listener(answer: bytes | None) -> Iterator[str]:
    """The address of a server that answers a connection with `answer` and closes it. It is silent if `answer` is None."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                if answer is None:
                    done.wait()
                else:
                    connection.recv(1024)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            done.set()
            thread.join()


@pytest.fixture(autouse=True)
def ray_init(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that `ray.init` was called with."""
    addresses: list[str] = []
    monkeypatch.setattr(ray, "init", lambda address, **_: addresses.append(address))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    # Ray replaces an address of this machine by that of its network interface, at which these servers do not listen.
    monkeypatch.setattr("ray._private.services.resolve_ip_for_localhost", lambda host: host)
    return addresses


def refusal(address: str) -> str:
    with pytest.raises(PacelineError) as error:
        deployment.connect(cluster_config({"ray": address, "pools": [POOL]}))
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(f"no Ray head at {address!r} (")
    assert "`ray start --head`" in text
    return text.split("(")[1].split(")")[0]


def test_nothing_listens(ray_init: list[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # it does not listen
        assert refusal(f"127.0.0.1:{closed.getsockname()[1]}") == "Connection refused"
    assert not ray_init


def test_another_server(ray_init: list[str]) -> None:
    with listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        assert refusal(address) == "the server there is none"
    assert not ray_init


def test_a_server_that_does_not_answer(ray_init: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployment, "ANSWER_SECONDS", 0.05)
    with listener(None) as address:
        assert refusal(address) == "no answer within 0.05 s"
    assert not ray_init


def test_an_address_without_a_port() -> None:
    assert "head" in refusal("head")


def test_no_head_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: None)
    assert refusal("auto") == "none runs on this machine"


def test_a_head_is_connected_to(ray_init: list[str]) -> None:
    with listener(SETTINGS) as address:
        assert deployment.connect(cluster_config({"ray": address, "pools": [POOL]})) is ray
    assert ray_init == [address]
