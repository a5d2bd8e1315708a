"""A `vllm serve` process that ends with its worker."""

import json
import logging
import socket
import tempfile
from collections.abc import Sequence

from paceline.core.child import DEVNULL, ChildProcess
from paceline.core.errors import InvalidConfig

logger = logging.getLogger(__name__)

GRACE = 10.0
"""Seconds that the server has to exit after SIGTERM."""
EVENTS_ARGUMENT = "--kv-events-config"


class ServerProcess:
    """The process starts with the object. It gets SIGTERM when its worker ends, also by SIGKILL."""

    def __init__(self, executable: str, model: str, arguments: Sequence[str], publishes: bool = False) -> None:
        """With `publishes` the server sends KV events over sockets in a private folder, unless `arguments` configure them."""
        self.port = _free_port()
        self.kv_events: tuple[str, str] | None = None
        """Addresses of its KV events and of their replay. None if it publishes no events."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if publishes and not any(argument.startswith(EVENTS_ARGUMENT) for argument in arguments):
            self._folder = tempfile.TemporaryDirectory(prefix="paceline-kv-")
            self.kv_events = f"ipc://{self._folder.name}/events", f"ipc://{self._folder.name}/replay"
            events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.kv_events[0]}
            arguments = (*arguments, EVENTS_ARGUMENT, json.dumps({**events, "replay_endpoint": self.kv_events[1]}))
        command = [*executable.split(), model, "--host", "127.0.0.1", "--port", str(self.port), *arguments]
        logger.info("starting %s", " ".join(command))
        try:
            # In the worker's session, so that it also ends when the supervisor kills the worker
            self._process = ChildProcess(command, stdin=DEVNULL, own_session=False, ends_by_signal=True)
        except OSError as error:
            raise InvalidConfig(
                f"{command[0]} cannot be started: {error}; set upstream.executable to the command of vLLM"
            ) from error

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.exit_code

    def close(self) -> None:
        """Terminate it, and kill it if it does not exit in time."""
        self._process.stop(GRACE)
        if self._folder is not None:
            self._folder.cleanup()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
