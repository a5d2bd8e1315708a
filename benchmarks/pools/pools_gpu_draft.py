"""For pools_gpu.py: draft workers as processes, on cores of the host or on the target's GPU, and the time of their passes."""

import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from statistics import median
from typing import NamedTuple

import torch

from paceline.core.machine import freeze_loaded_objects
from paceline.core.sampling import SamplingParams
from paceline.engine.build import pick_dtype
from paceline.kernels.cpu import native
from paceline.models.drafts.compatibility import fingerprint
from paceline.models.loading.load import load_model
from paceline.models.runners import make_runner
from paceline.runtime.draft_worker.core import DraftBranch, DraftedToken
from paceline.runtime.draft_worker.model_core import ModelCore
from paceline.runtime.draft_worker.scheduler import DraftLimits
from paceline.runtime.draft_worker.worker import DraftWorker, DraftWorkerStatus
from paceline.runtime.wire.messages import TO_DRAFT_WORKER
from paceline.runtime.wire.transport import Listener
from paceline.speculation.proposers.model_drafter import SequenceParams

MAX_ROWS = 512
MAX_PASSES = 4096
"""Passes whose times a worker keeps."""
TIMED_PASSES = 24
PAUSE = 0.0002
"""Seconds between two passes of a worker, in which it schedules, answers and receives."""
CONTEXT = 64
"""Tokens of a sequence before the passes that `pass_times` measures."""
BATCHES = (1, 4, 16)
SPINS = (0.0001, 0.001)
"""Seconds that idle threads of the kernels wait before they sleep: the default, and longer than the pause between passes."""
STARTED = time.perf_counter()


def log(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", flush=True)


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Settings of a worker's process."""

    name: str
    model: str
    device: str
    nodes: int
    """Nodes drafted ahead per sequence and round; 0: on demand."""
    num_blocks: int
    cores: tuple[int, ...] = ()
    """Cores that the process may use; empty: all."""
    widest: int = 1
    """Branches of the largest pass that a GPU prepares for."""


class PassTime(NamedTuple):
    """One pass of a draft model; seconds on the machine's clock, which all processes share."""

    began: float
    ended: float
    branches: int


class HostThreads(NamedTuple):
    """Threads of the kernels on a CPU."""

    count: int
    spin: float
    """Seconds that they wait before they sleep."""


PassTimes = dict[tuple[HostThreads, int], float]
"""Seconds of one drafted token, by threads and number of sequences."""


class Figures(NamedTuple):
    """What a worker reports."""

    status: DraftWorkerStatus
    passes: list[PassTime]
    gpu_bytes: int


class TimedCore:
    """A `DraftCore` that keeps the times of its passes."""

    def __init__(self, core: ModelCore) -> None:
        self._core = core
        self.passes: deque[PassTime] = deque(maxlen=MAX_PASSES)

    def step(self, branches: Sequence[DraftBranch]) -> list[DraftedToken | None]:
        began = time.perf_counter()
        drafted = self._core.step(branches)
        self.passes.append(PassTime(began, time.perf_counter(), len(branches)))
        return drafted

    def fork(self, branch: DraftBranch, child: DraftBranch) -> None:
        self._core.fork(branch, child)

    def truncate(self, branch: DraftBranch, length: int) -> None:
        self._core.truncate(branch, length)

    def close(self, branches: Sequence[DraftBranch]) -> None:
        self._core.close(branches)


def serve(pipe: Pipe, settings: DraftSettings) -> None:
    """The worker's process. Commands: a list of `HostThreads` returns the times of passes, one alone starts the worker with
    them and returns its address, then "figures" returns `Figures`. The end of the pipe ends the process."""
    try:
        core, tokenizer, size = _load(settings)
    except Exception as error:
        pipe.send(f"failed: {error}")
        return
    freeze_loaded_objects()  # as a worker of a cluster does
    with suppress(EOFError, OSError):  # the pipe is closed
        pipe.send("ready")
        while isinstance(command := pipe.recv(), list):
            pipe.send(pass_times(core, command))
        _use_cores(settings.cores, command)
        timed = TimedCore(core)
        limits = DraftLimits(ahead_nodes=settings.nodes, max_tokens=settings.num_blocks * 12)
        listener = Listener("tcp://127.0.0.1:0", TO_DRAFT_WORKER)
        worker = DraftWorker(settings.name, timed, listener, tokenizer, size, limits)
        threading.Thread(target=_answer, args=(pipe, worker, timed, settings.device), daemon=True).start()
        pipe.send(worker.address)
        worker.run()


def _load(settings: DraftSettings) -> tuple[ModelCore, object, int]:
    device = torch.device(settings.device)
    torch.set_num_threads(1)
    if device.type == "cpu" and not native.available():
        raise RuntimeError("no native kernels: install a C compiler (gcc or clang), or the package ziglang")
    loaded = load_model(settings.model, device, pick_dtype("auto", device))
    size = loaded.config.vocab_size
    core = ModelCore(make_runner(loaded.model, settings.num_blocks), MAX_ROWS, size, size)
    _warm(core, settings.widest)
    return core, fingerprint(loaded.tokenizer), size


def _use_cores(cores: Sequence[int], threads: HostThreads) -> None:
    """Let this thread and the threads of the kernels, which start anew, run on these cores."""
    if cores:
        os.sched_setaffinity(0, cores)
    native.set_num_threads(threads.count)
    native.set_spin_seconds(threads.spin)


def _answer(pipe: Pipe, worker: DraftWorker, core: TimedCore, device: str) -> None:
    with suppress(EOFError, OSError):
        while pipe.recv() == "figures":
            gpu_bytes = torch.cuda.memory_reserved() if device.startswith("cuda") else 0
            pipe.send(Figures(worker.status(), list(core.passes), gpu_bytes))
    worker.stop()


def _branches(count: int, length: int, first: int) -> list[DraftBranch]:
    params = SequenceParams(SamplingParams(temperature=0.0), 0, 0, 1, "coupled", "")
    ids = [[1000 + (first + 37 * i + j) % 40_000 for j in range(length)] for i in range(count)]
    return [DraftBranch(-first - i, params, tokens, length) for i, tokens in enumerate(ids, 1)]


def _warm(core: ModelCore, widest: int) -> None:
    """Run every shape of pass once, so that no measurement includes compilation or capture."""
    length = 8
    while length <= MAX_ROWS:
        branches = _branches(1, length, 10 * length)
        core.step(branches)
        core.close(branches)
        length *= 2
    batch = 1
    while batch < 2 * widest:  # passes are padded to powers of two
        branches = _branches(batch, 8, 10_000 + 300 * batch)
        core.step(branches)
        for rows in (1, 2, 4, 8):
            for one in branches:
                one.ids.extend([1000] * rows)
            core.step(branches)
        core.close(branches)
        batch *= 2


def pass_times(core: ModelCore, kinds: Sequence[HostThreads]) -> PassTimes:
    """Median times of one drafted token: the pass, the choice of the tokens and the ranking of their alternatives. The pause
    between two passes is that of a worker."""
    times: PassTimes = {}
    cores = sorted(os.sched_getaffinity(0))
    for threads in kinds:
        _use_cores(cores[-threads.count :], threads)
        for batch in BATCHES:
            branches = _branches(batch, CONTEXT, 20_000 + 100 * batch + threads.count)
            seconds = []
            for _ in range(TIMED_PASSES):
                until = time.perf_counter() + PAUSE
                while time.perf_counter() < until:
                    pass
                began = time.perf_counter()
                drafted = core.step(branches)
                seconds.append(time.perf_counter() - began)
                for branch, token in zip(branches, drafted, strict=True):
                    branch.append(token)
            core.close(branches)
            times[threads, batch] = median(seconds[4:])  # the first one computes the prompt
    os.sched_setaffinity(0, cores)
    return times


class DraftProcess:
    """The client of `serve`. Loading starts at construction; `until_ready` waits for it."""

    def __init__(self, settings: DraftSettings) -> None:
        self.settings, self.address = settings, ""
        self.is_ready = False
        self._pipe, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=serve, args=(there, settings), daemon=True)
        self._process.start()
        there.close()
        LIVE.append(self)

    def until_ready(self, seconds: float) -> None:
        if (state := self._receive(seconds)) != "ready":
            raise RuntimeError(f"the draft worker {state}")
        self.is_ready = True

    def pass_times(self, kinds: Sequence[HostThreads]) -> PassTimes:
        self._pipe.send(list(kinds))
        times = self._receive(60.0)
        assert isinstance(times, dict)
        return times

    def start(self, threads: HostThreads) -> None:
        """Start its worker; `address` is then known."""
        self._pipe.send(threads)
        self.address = str(self._receive(20.0))

    def figures(self) -> Figures:
        self._pipe.send("figures")
        figures = self._receive(20.0)
        assert isinstance(figures, Figures)
        return figures

    def close(self) -> None:
        LIVE.remove(self)
        self._pipe.close()
        self._process.join(5)
        self.kill()

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)

    def _receive(self, seconds: float) -> object:
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"the draft worker {self.settings.name} sent nothing for {seconds:.0f} s")
        try:
            answer: object = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the process of the draft worker {self.settings.name} ended") from None
        return answer


LIVE: list[DraftProcess] = []


@contextmanager
def processes(settings: Sequence[DraftSettings]) -> Iterator[list[DraftProcess]]:
    """Start a process for each; all end with the context."""
    started: list[DraftProcess] = []
    try:
        for one in settings:
            started.append(DraftProcess(one))
        yield started
    finally:
        for process in started:
            process.close()
