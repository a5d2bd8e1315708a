"""A server process with the embedded model on a free port."""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

CODE = """
import json, sys
from paceline.server.config.config import load_config
from paceline.server.serve import serve

def ready(ready):
    assert "torch" not in sys.modules, "the gateway's process has imported torch"
    print("READY", ready.url, flush=True)

config = load_config(None, {}, json.loads(sys.argv[1]))
sys.exit(serve(config, ready))
"""
SMALL = {"port": 0, "kv_tokens": 4096, "max_model_len": 1024, "max_num_seqs": 8, "log_level": "warning"}
START_SECONDS = 120


@dataclass
class Process:
    url: str
    popen: "subprocess.Popen[str]"

    def stop(self, signal_number: int, timeout: float = 30) -> int:
        """Sends the signal and returns the exit code."""
        self.popen.send_signal(signal_number)
        return self.popen.wait(timeout)


@contextmanager
def server_process(**config: Any) -> Iterator[Process]:
    popen = subprocess.Popen(
        [sys.executable, "-c", CODE, json.dumps({**SMALL, **config})],
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
        words = lines.get(timeout=START_SECONDS).split()
        assert words[:1] == ["READY"], popen.stderr.read()
        yield Process(words[1], popen)
    finally:
        popen.kill()
        popen.wait()
        popen.stdout.close()
        popen.stderr.close()
