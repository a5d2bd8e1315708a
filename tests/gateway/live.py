"""A server of the test process on a free port."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from tests.gateway.fakes import Served


@contextmanager
def running(server: Served) -> Iterator[str]:
    """Runs the server in a thread and yields its URL."""
    settings = uvicorn.Config(server.app, log_level="warning", lifespan="on", ws="none", timeout_graceful_shutdown=1)
    runner = uvicorn.Server(settings)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=runner.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            runner.should_exit = True
            thread.join(20)
            assert not thread.is_alive()
