"""What device_copies.py reads with: the sending worker's process, hand-offs of its cached prompt, and parts of its weights."""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from device_copies_source import greedy

from paceline.cluster.routing.kv_index import PeerHint
from paceline.core.clock import WallClock
from paceline.core.cluster_config import HealthConfig
from paceline.engine.build import pick_dtype
from paceline.engine.hooks.imports import PromptImport
from paceline.engine.loop import EngineLoop
from paceline.models.loading.weight_manifest import weight_form
from paceline.runtime.handoff.cache_memory import PeerCaches
from paceline.runtime.handoff.prefill_connections import PrefillConnections
from paceline.runtime.handoff.remote_prompt import RemotePrompt
from paceline.runtime.transfer.client import TransferClient
from paceline.runtime.transfer.device_memory import DeviceMemory
from paceline.runtime.weights.peer_source import PeerSource
from paceline.runtime.weights.spec import PeerAddress
from paceline.runtime.wire.gateway_messages import WorkerAddress


class Sender:
    """The sending worker."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.first: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the sending worker failed; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, command: str) -> dict[str, Any]:
        print(command, file=self._process.stdin, flush=True)
        return self.read()


class BlockReader:
    """Fetches the sender's cached prompt into the cache of an engine, as a target does, without using it."""

    def __init__(self, loop: EngineLoop, address: str, memory: DeviceMemory | None) -> None:
        self._loop, self._clock = loop, WallClock()
        self._ended: SimpleQueue[tuple[RemotePrompt, int]] = SimpleQueue()
        caches = PeerCaches(loop.engine.runner, memory)
        self._connections = PrefillConnections(
            lambda prompt, blocks: self._ended.put((prompt, blocks)), None, None, HealthConfig(), self._clock, caches
        )
        self._connections.set_workers((), [WorkerAddress("source", address)])
        while self._connections.peer("source") is None:
            time.sleep(0.01)

    def fetch(self, ids: tuple[int, ...], publishes: bool = False) -> tuple[float, int, bool]:
        """Seconds, bytes, and whether they were read in place."""
        found: list[PromptImport | None] = []
        imports, name = self._loop.engine.imports, "publish" if publishes else "fetch"
        self._loop.run(lambda: found.append(imports.reserve(name, ids, "")))
        incoming = found[0]
        if incoming is None:
            raise RuntimeError("the cache is too small for the prompt")
        prompt = RemotePrompt(greedy(name, ids, 8), lambda event: None, ids, PeerHint("source", len(ids)))
        prompt.incoming, prompt.worker, prompt.requested = incoming, "source", self._clock.now()
        prompt.deadline = prompt.requested + 60.0
        began = time.perf_counter()
        self._connections.request(prompt)
        _, blocks = self._ended.get()
        seconds = time.perf_counter() - began
        if blocks != incoming.plan.end:
            raise RuntimeError(f"the hand-off failed: {prompt.reason}")
        end = (lambda: imports.publish(incoming, blocks)) if publishes else (lambda: imports.release(incoming))
        self._loop.run(end)
        return seconds, incoming.plan.num_bytes, incoming.plan.in_place

    def close(self) -> None:
        self._connections.close()


class PartReader:
    """Loads parts of the sender's weights over two connections, as a starting worker does, and drops them."""

    def __init__(self, address: str, device: torch.device, memory: DeviceMemory | None) -> None:
        self._client = TransferClient(None)
        first = PeerSource(PeerAddress("source", address), None, self._client, device, memory)
        first.connect(weight_form(device, pick_dtype("auto", device), None), "")
        self._peers = [first, first.duplicate()]
        self.is_in_place = first.is_in_place
        self.parts = list(range(1, len(first.manifest.parts)))
        self._sizes = [part.nbytes for part in first.manifest.parts]

    def load(self, parts: list[int]) -> int:
        """Bytes of the parts."""

        def run(number: int) -> None:
            for part in parts[number :: len(self._peers)]:
                self._peers[number].load(part, threading.Event())

        with ThreadPoolExecutor(len(self._peers)) as pool:
            list(pool.map(run, range(len(self._peers))))
        return sum(self._sizes[part] for part in parts)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._client.close()


@contextmanager
def sender(options: argparse.Namespace) -> Iterator[Sender]:
    command = [sys.executable, str(Path(__file__).with_name("device_copies_source.py"))]
    for name in ("model", "device", "prompt", "limit"):
        command += [f"--{name}", str(getattr(options, name))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Sender(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
