"""Processes of the other ranks of a tensor-parallel model. This process is rank 0.

Rank 0 schedules and samples. It announces each pass to the other ranks, over one socket per rank, and all ranks compute the
pass together. The inputs travel with the announcement; on GPUs they follow from device to device, see `gpu.py`. In a pass the
ranks exchange tensors only by sums. A second socket per rank carries weights, so that they delay no pass. A rank exits when its
sockets close, so none outlives rank 0.

`RankMonitor` ends this process if its GPU waits for a rank that has exited. A sum over ranks in a CUDA graph has no time limit:
without the other rank the device waits forever, and so does every thread that waits for the device. An error cannot be raised
there. Without a GPU, or between passes, a lost rank raises `RankLost`.
"""

import contextlib
import itertools
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from paceline.core.child import DEVNULL, ChildProcess
from paceline.core.errors import InvalidConfig, RankLost
from paceline.core.machine import usable_cores
from paceline.kernels.cpu import native
from paceline.models.families.spec import DecoderSpec
from paceline.models.parallel.caches import CacheShape, receive_cache
from paceline.models.parallel.commands import Command, Failed, RankSpec, Settle, Share, Start
from paceline.models.parallel.group import GROUP_TIMEOUT, RankGroup
from paceline.models.runner import Cache

STUCK_SECONDS = 20.0
"""Time for the device to finish its work after a rank has exited. Longer than any pass."""
EXIT_STATUS = 70
"""Status of a process that ends this way."""
logger = logging.getLogger(__name__)


def exit_process(message: str) -> None:
    logger.critical(message)
    logging.shutdown()
    os._exit(EXIT_STATUS)


class RankMonitor:
    """Watches the processes of the other ranks, in a thread."""

    def __init__(
        self,
        processes: Sequence[ChildProcess],
        finish: Callable[[], None],
        end_process: Callable[[str], None] = exit_process,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        """`finish` blocks until the device has finished its work."""
        self._processes, self._finish, self._end_process = processes, finish, end_process
        self._stuck_seconds = stuck_seconds
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, args=(rank, process), name=f"paceline-rank-{rank}", daemon=True)
            for rank, process in enumerate(processes, 1)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """The ranks may exit from now on."""
        self._closed.set()

    def join(self, seconds: float) -> None:
        """Wait until the threads have ended, at most `seconds` for each."""
        for thread in self._threads:
            thread.join(seconds)

    def _watch(self, rank: int, process: ChildProcess) -> None:
        code = process.wait()
        if self._closed.is_set():
            return
        finished = threading.Event()

        def finish() -> None:
            self._finish()
            finished.set()

        threading.Thread(target=finish, name="paceline-rank-finish", daemon=True).start()
        if not finished.wait(self._stuck_seconds) and not self._closed.is_set():
            self._end_process(
                f"rank {rank} of {len(self._processes) + 1} exited with status {code} during a pass, which "
                "cannot end without it: this process ends; start it again"
            )


HOST = "127.0.0.1"
RANK_PROCESS = "paceline.models.parallel.process"
"""Program of the other ranks."""
GRACE_SECONDS = 5.0
"""Time for a rank to exit before it is killed."""


def share_cores(size: int) -> None:
    """Divide the cores among the ranks of one CPU."""
    native.set_num_threads(max(1, usable_cores() // size))


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    rank: int
    process: ChildProcess
    connection: Connection
    weights: Connection


class Ranks:
    """The other ranks of a group. A process can be in one group at a time."""

    def __init__(self, spec: RankSpec, config: DecoderSpec, members: Sequence[_Member], store: TCPStore) -> None:
        self.spec, self._members, self._store = spec, members, store
        self.config = config
        """Configuration of the whole model."""
        self.group = RankGroup(spec, rank=0)
        self._caches = itertools.count()
        self._closed = False
        self._monitor: RankMonitor | None = None
        self.lock = threading.RLock()
        """Held for a pass on CPUs, and for a command with its answers: the ranks execute one at a time. On GPUs one thread
        submits all passes."""

    @classmethod
    def start(cls, spec: RankSpec, config: DecoderSpec, sends_weights: bool = False) -> "Ranks":
        """Start the processes. They load their weights in parallel with this process; `join` waits for them. `config` is the
        configuration of the whole model. `sends_weights` is true if this process sends their weights over `weights`."""
        if dist.is_initialized():
            raise InvalidConfig("this process already belongs to a distributed group: close the other engine first")
        if spec.device.type == "cuda":
            have, last = torch.cuda.device_count(), spec.device_of(spec.size - 1)
            if last.index >= have:
                raise InvalidConfig(
                    f"tensor_parallel_size {spec.size} needs {last}, and there are {have} GPUs: lower it"
                )
        store = TCPStore(HOST, 0, spec.size, is_master=True, wait_for_workers=False, timeout=GROUP_TIMEOUT)
        ranks = cls(spec, config, [_spawn(rank) for rank in range(1, spec.size)], store)
        try:
            for member in ranks._members:
                start = Start(spec, member.rank, store.port, config if sends_weights else None)
                member.connection.send(start)
        except OSError:
            lost = ranks._lost()
            ranks.close()
            raise lost from None
        if spec.device.type == "cpu":
            share_cores(spec.size)
        return ranks

    @property
    def size(self) -> int:
        """Ranks of the group, including this process."""
        return self.spec.size

    @property
    def num_head_shares(self) -> int:
        """Shares into which the ranks divide the key-value heads; several ranks have each share if there are few heads."""
        return min(self.size, self.config.num_kv_heads)

    def next_cache(self) -> int:
        """A number for a new cache; 0 is the first."""
        return next(self._caches)

    @property
    def weights(self) -> list[Connection]:
        """Connections for weights, of the ranks from 1 on."""
        return [member.weights for member in self._members]

    @property
    def pids(self) -> list[int]:
        return [member.process.pid for member in self._members]

    def join(self) -> None:
        """Block until every rank has loaded its weights and joined the group."""
        for member in self._members:
            self._receive(member, "could not start")
        with self.report_lost_ranks():
            self.group.join(self._store)
        if self.spec.device.type == "cuda":
            synchronize = partial(torch.cuda.synchronize, self.spec.device)
            self._monitor = RankMonitor([member.process for member in self._members], synchronize)

    def send(self, command: Command) -> None:
        """Send a command to all ranks, which execute commands in order."""
        try:
            with self.lock:
                for member in self._members:
                    if member.process.exit_code is not None:
                        raise self._lost()
                    member.connection.send(command)
        except OSError:
            raise self._lost() from None

    def settle(self) -> None:
        """Wait until the ranks have executed all commands."""
        with self.lock:
            self.send(Settle())
            for member in self._members:
                self._receive(member, "failed")

    def map_caches(self, cache: int, shape: CacheShape) -> list[Cache]:
        """The caches with this number of the ranks from 1 on, in the memory of this process."""
        with self.lock:
            self.send(Share(cache))
            return [
                receive_cache(self._receive(member, "failed"), member.connection, shape) for member in self._members
            ]

    @contextlib.contextmanager
    def report_lost_ranks(self) -> Iterator[None]:
        """Raise `RankLost` for an error of a collective operation if a rank has exited; otherwise re-raise the error."""
        try:
            yield
        except RuntimeError as error:
            if self._first_dead(GRACE_SECONDS) is None:
                raise
            raise self._lost() from error

    def close(self) -> None:
        """Stop the ranks and leave the group. Can be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._monitor is not None:
            self._monitor.close()
        if self.spec.device.type == "cuda" and dist.is_initialized():
            self._finish_passes()
        for member in self._members:
            member.connection.close()
            member.weights.close()
        for member in self._members:
            if member.process.wait(GRACE_SECONDS) is None:
                member.process.kill()
                member.process.wait()
        self.group.leave()
        if self.spec.device.type == "cpu":
            share_cores(1)

    def _finish_passes(self) -> None:
        """Wait for passes in flight: if a rank ended before them, the devices of the other ranks would wait forever. It does
        not wait if a rank is lost or does not answer."""
        with contextlib.suppress(RankLost, RuntimeError), self.lock:
            self.send(Settle())
            for member in self._members:
                if not member.connection.poll(GRACE_SECONDS):
                    return
                self._receive(member, "failed")
            torch.cuda.synchronize(self.spec.device)

    def _receive(self, member: _Member, failure: str) -> Any:
        """The next message of a rank. Raises `RankLost` if there is none, or if it reports an error."""
        wait([member.connection])  # also returns when the connection is closed
        try:
            answer = member.connection.recv()
        except (EOFError, OSError):
            raise self._lost() from None
        if isinstance(answer, Failed):
            raise RankLost(f"rank {member.rank} of {self.spec.size} {failure}: {answer.reason}")
        return answer

    def _first_dead(self, seconds: float) -> _Member | None:
        """A rank that has exited, possibly a moment after its connection broke; None if all still run after `seconds`."""
        for member in self._members:
            if member.process.wait(seconds / len(self._members)) is not None:
                return member
        return None

    def _lost(self) -> RankLost:
        member = self._first_dead(GRACE_SECONDS)
        if member is None:
            return RankLost(f"one of {self.spec.size} ranks does not respond: restart the engine")
        code, reason = member.process.exit_code, ""
        assert code is not None
        with contextlib.suppress(EOFError, OSError):
            while member.connection.poll():
                message = member.connection.recv()
                reason = f": {message.reason}" if isinstance(message, Failed) else reason
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        return RankLost(
            f"rank {member.rank} of {self.spec.size} {how}, and its part of the model is lost: restart the engine{reason}"
        )


def _spawn(rank: int) -> _Member:
    # NOTE: multiprocessing would run the caller's main module again, and a script without a guard would start itself
    pairs = [socket.socketpair() for _ in range(2)]
    fds = [rank_end.fileno() for _, rank_end in pairs]
    process = ChildProcess(
        [sys.executable, "-m", RANK_PROCESS, *map(str, fds)],
        stdin=DEVNULL,
        file_descriptors=fds,
        own_session=False,
    )
    for _, rank_end in pairs:
        rank_end.close()
    return _Member(rank, process, *(Connection(own_end.detach()) for own_end, _ in pairs))
