"""A server process with the embedded model on a free port, or the gateway process of a cluster."""

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CODE = """
import json, sys
from pathlib import Path
from paceline.deploy.load import load_gateway_config
from paceline.deploy.serving import serve

def ready(ready):
    assert "torch" not in sys.modules, "the gateway's process has imported torch"
    print("READY", ready.url, flush=True)

config = load_gateway_config(Path(sys.argv[2]) if sys.argv[2:] else None, {}, json.loads(sys.argv[1]))
sys.exit(serve(config, ready))
"""
SMALL = {"port": 0, "kv_tokens": 4096, "max_model_len": 1024, "max_num_seqs": 8, "log_level": "warning"}
START_SECONDS = 600
"""A process that dies is noticed at once; a busy machine may start one slowly."""


@dataclass
class Process:
    url: str
    popen: "subprocess.Popen[str]"

    def stop(self, signal_number: int, timeout: float = 30) -> int:
        """Sends the signal and returns the exit code."""
        self.popen.send_signal(signal_number)
        return self.popen.wait(timeout)


@contextmanager
def cluster_process(file: Path, **config: Any) -> Iterator[Process]:
    """The gateway of the cluster in this file, which starts the workers and ends them."""
    arguments = [json.dumps({"port": 0, "log_level": "warning", **config}), str(file)]
    with _started(arguments) as process:
        yield process
        process.stop(signal.SIGTERM)


@contextmanager
def server_process(before: str = "", start_seconds: float = START_SECONDS, **config: Any) -> Iterator[Process]:
    """`before` is Python code that the process runs first."""
    with _started([json.dumps({**SMALL, **config})], before, start_seconds) as process:
        yield process


@contextmanager
def _started(arguments: list[str], before: str = "", start_seconds: float = START_SECONDS) -> Iterator[Process]:
    popen = subprocess.Popen(
        [sys.executable, "-c", before + CODE, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert popen.stdout is not None
    assert popen.stderr is not None
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=lambda: lines.put(popen.stdout.readline()), daemon=True).start()  # type: ignore[union-attr]
    try:
        words = lines.get(timeout=start_seconds).split()
        assert words[:1] == ["READY"], popen.stderr.read()
        yield Process(words[1], popen)
    finally:
        popen.kill()
        popen.wait()
        popen.stdout.close()
        popen.stderr.close()
