"""Errors of an address that the server cannot bind."""

import socket

import pytest

from paceline.core.errors import InvalidConfig
from paceline.deploy.serving import _listen


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InvalidConfig, match=f"127.0.0.1:{port}.*set another `port`"):
            _listen("127.0.0.1", port)


def test_an_address_of_another_machine() -> None:
    with pytest.raises(InvalidConfig, match="`host` must be an address of this machine"):
        _listen("192.0.2.1", 0)  # reserved for documentation
