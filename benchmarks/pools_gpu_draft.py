"""For pools_gpu.py: a draft worker on the target's GPU, as a thread or as a process."""

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from paceline.core.sampling import SamplingParams
from paceline.engine.build import pick_dtype
from paceline.models.drafts.compatibility import Fingerprint, fingerprint
from paceline.models.loading.load import load_model
from paceline.models.runners import make_runner
from paceline.runtime.draft_worker.core import DraftBranch
from paceline.runtime.draft_worker.model_core import ModelCore
from paceline.runtime.draft_worker.scheduler import DraftLimits
from paceline.runtime.draft_worker.worker import DraftWorker, DraftWorkerStatus
from paceline.runtime.wire.messages import (
    TO_DRAFT_WORKER,
    TO_TARGET,
    VERSION,
    Advance,
    Drafts,
    FromDraft,
    Hello,
    Open,
    RoundRequest,
)
from paceline.runtime.wire.transport import Connection, Listener
from paceline.speculation.proposers.model_drafter import SequenceParams

NUM_BLOCKS = 1024
MAX_ROWS = 512
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
PROBE = """
import torch
x = torch.ones(256, 256, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x @ x
graph.replay()
assert float(y.sum()) == 256.0**3
print("works")
"""


@dataclass(frozen=True, slots=True)
class Draft:
    """Settings of the worker. `widest`: branches of the largest pass."""

    model: str
    device: str
    widest: int
    prompt: int


STARTED = time.perf_counter()


def log(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", flush=True)


def serve(pipe: Pipe, draft: Draft) -> None:
    """Load the model once, then serve commands. A number starts a worker that drafts this many nodes ahead and returns its
    address; None ends that worker and returns its snapshot. The function ends when the pipe closes."""
    try:
        device = torch.device(draft.device)
        loaded = load_model(draft.model, device, pick_dtype("auto", device))
        size = loaded.config.vocab_size
        core = ModelCore(make_runner(loaded.model, NUM_BLOCKS), MAX_ROWS, size, size)
        warm(core, draft)
        tokenizer = fingerprint(loaded.tokenizer)
    except Exception as error:
        pipe.send(f"failed: {error!r}")
        return
    pipe.send("ready")
    with suppress(EOFError, OSError):  # the pipe is closed
        while True:
            limits = DraftLimits(ahead_nodes=pipe.recv(), max_tokens=NUM_BLOCKS * 8)
            listener = Listener("tcp://127.0.0.1:0", TO_DRAFT_WORKER)
            worker = DraftWorker("draft-0", core, listener, tokenizer, size, limits)
            pipe.send(worker.address)
            watch = threading.Thread(target=_stop_when_told, args=(pipe, worker), daemon=True)
            watch.start()
            worker.run()
            watch.join()
            pipe.send(worker.status())


def _stop_when_told(pipe: Pipe, worker: DraftWorker) -> None:
    with suppress(EOFError, OSError):
        pipe.recv()
    worker.stop()


def warm(core: ModelCore, draft: Draft) -> None:
    """Run every shape of pass once, so that no measurement includes compilation or capture."""
    params = SequenceParams(SamplingParams(temperature=0.0), 0, 0, 1, "coupled", "")
    number, tokens = 0, iter(range(1000, 40_000))

    def branch(length: int) -> DraftBranch:
        nonlocal number
        number += 1
        return DraftBranch(-number, params, [next(tokens) for _ in range(length)], length)

    length = 8
    while length <= draft.prompt:
        branches = [branch(length)]
        core.step(branches)
        core.close(branches)
        length *= 2
    batch = 1
    while batch < 2 * draft.widest:  # passes are padded to powers of two
        branches = [branch(8) for _ in range(batch)]
        core.step(branches)
        for rows in (1, 2, 4, 8):
            for one in branches:
                one.ids.extend([1000] * rows)
            core.step(branches)
        child = DraftBranch(-1_000_000 - batch, params, [*branches[0].ids, 1001], branches[0].num_committed)
        core.fork(branches[0], child)
        core.close([child, *branches])
        batch *= 2


class Host:
    """The client of `serve`. Loading starts at construction; `until_ready` waits for it."""

    def __init__(self, name: str, draft: Draft, is_process: bool, mps: str | None = None) -> None:
        """`mps`: pipe folder of the MPS daemon for a process."""
        self.name = name
        self.last: DraftWorkerStatus | None = None
        """Final snapshot of the last worker."""
        self.is_lost = False
        self._pipe, there = multiprocessing.Pipe()
        self._process: BaseProcess | None = None
        if is_process:
            with _environment(mps or os.path.join(tempfile.gettempdir(), "no-mps-here")):
                self._process = multiprocessing.get_context("spawn").Process(
                    target=serve, args=(there, draft), daemon=True
                )
                self._process.start()
            there.close()
        else:
            self._thread = threading.Thread(target=serve, args=(there, draft), daemon=True)
            self._thread.start()
        LIVE.append(self)

    def until_ready(self, seconds: float) -> None:
        if (state := self._hear(seconds)) != "ready":
            raise RuntimeError(f"the draft worker {state}")

    @contextmanager
    def worker(self, nodes: int) -> Iterator[str]:
        """Start a worker that drafts `nodes` ahead; return its address."""
        self._pipe.send(nodes)
        address = self._hear(20.0)
        try:
            yield str(address)
        finally:
            self._pipe.send(None)
            snapshot = self._hear(20.0)
            assert isinstance(snapshot, DraftWorkerStatus)
            self.last = snapshot

    def close(self) -> None:
        LIVE.remove(self)
        self._pipe.close()
        if self._process is None:
            self._thread.join(10)
        else:
            self._process.join(10)
            self.kill()

    def kill(self) -> None:
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join(5)

    def _hear(self, seconds: float) -> object:
        self.is_lost = True
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"the draft worker sent nothing for {seconds:.0f} s")
        try:
            answer: object = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the draft worker's process ended") from None
        self.is_lost = False
        return answer


LIVE: list[Host] = []


@contextmanager
def _environment(pipe: str) -> Iterator[None]:
    """Environment of a process started inside the block; a folder without a daemon means no MPS."""
    before = os.environ.get(PIPE)
    os.environ[PIPE] = pipe
    try:
        yield
    finally:
        del os.environ[PIPE]
        if before is not None:
            os.environ[PIPE] = before


@contextmanager
def mps_daemon() -> Iterator[str | None]:
    """The pipe folder of a working MPS daemon; None if it does not work, with the reason in the output."""
    name = "nvidia-cuda-mps-control"
    control = shutil.which(name) or shutil.which(name, path="/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/bin")
    if control is None:
        log(f"MPS: no {name} here")
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="mps"))
    env = {**os.environ, PIPE: str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    daemon = subprocess.Popen([control, "-f"], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        is_working = _probe(env, folder)
        if not is_working:
            _quit(control, env, daemon)
        yield str(folder) if is_working else None
    finally:
        _quit(control, env, daemon)
        shutil.rmtree(folder, ignore_errors=True)


def _probe(env: dict[str, str], folder: Path) -> bool:
    time.sleep(1.0)  # time to create its pipes
    try:
        done = subprocess.run([sys.executable, "-c", PROBE], env=env, timeout=60, capture_output=True, text=True)
        output = (done.stdout + done.stderr).strip()
    except subprocess.TimeoutExpired:
        output = "no answer in 60 s"
    daemon_log = "".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.log")))
    is_shared = "server" in daemon_log.lower()
    is_working = output.endswith("works") and is_shared
    log(f"MPS: the probe printed {output[-300:]!r}, {'through' if is_shared else 'without'} a server")
    if not is_working:
        print(log[-1500:], flush=True)
    return is_working


def _quit(control: str, env: dict[str, str], daemon: "subprocess.Popen[bytes]") -> None:
    if daemon.poll() is None:
        with suppress(subprocess.TimeoutExpired, OSError):
            subprocess.run([control], env=env, input=b"quit\n", timeout=15, capture_output=True)
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(5)
    if daemon.poll() is None:
        daemon.kill()
        daemon.wait(5)


class Feeder:
    """Keeps a worker busy: requests the next chain, from another token, as soon as one arrives."""

    def __init__(self, address: str, tokenizer: Fingerprint, ids: list[int], depth: int) -> None:
        self._address, self._tokenizer, self._ids, self._depth = address, tokenizer, ids, depth
        self._is_over = False
        self.each: list[float] = []
        """Seconds per token of each chain."""
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Feeder":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join(10)

    def _run(self) -> None:
        line: Connection[FromDraft] = Connection(self._address, TO_TARGET)
        try:
            line.send(Hello(VERSION, 1, self._tokenizer, "feeder"))
            hello = line.receive(10.0)
            if not isinstance(hello, Hello):
                raise RuntimeError(f"the draft worker answered {hello}")
            line.send(Open(hello.epoch, 1, self._ids, len(self._ids), SamplingParams(temperature=0.0), 0))
            length, committed, round_ = len(self._ids), list[int](), 0
            while not self._is_over:
                round_, sent = round_ + 1, time.perf_counter()
                line.send(Advance(hello.epoch, [RoundRequest(1, round_, length, committed, self._depth)]))
                length += len(committed)
                message = line.receive(0.2)
                while not isinstance(message, Drafts) and not self._is_over:
                    message = line.receive(0.2)
                if isinstance(message, Drafts):
                    drafted = message.drafts[0].tokens
                    self.each.append((time.perf_counter() - sent) / len(drafted))
                    committed = [1000 + (drafted[0] + 1) % 1000]  # not the drafted token, so the chain is discarded
        finally:
            line.close()
