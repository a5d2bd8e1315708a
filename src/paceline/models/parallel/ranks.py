"""The processes that share a model with this one, which is rank 0: started, told what to do, watched, ended.

Rank 0 schedules and samples. It sends the inputs of each pass to the others over a socket each, and all compute it in step:
tensors meet in the sums of `Shard.reduce` alone. A rank ends when its socket closes, so none outlives rank 0.
"""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # not in its __all__

from paceline.core.errors import InvalidConfig, RankLost
from paceline.core.machine import usable_cores
from paceline.kernels.cpu import native
from paceline.kernels.quantized import Quantization
from paceline.models.runner import Span

HOST = "127.0.0.1"
PATIENCE = timedelta(minutes=10)
"""How long a rank waits for another inside a sum before it gives up."""
GRACE_SECONDS = 5.0
"""What a rank gets to end by itself."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What every rank of a group loads."""

    model: str
    size: int
    device: torch.device
    """Of rank 0; GPUs of the others follow it."""
    dtype: torch.dtype
    quantization: Quantization | None = None

    def device_of(self, rank: int) -> torch.device:
        if self.device.type != "cuda":
            return self.device
        return torch.device("cuda", (self.device.index or 0) + rank)


@dataclass(frozen=True, slots=True)
class Start:
    spec: RankSpec
    rank: int
    port: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank has its weights."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The last a rank says."""

    reason: str


@dataclass(frozen=True, slots=True)
class Allocate:
    num_blocks: int
    kv_dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class Forward:
    spans: tuple[Span, ...]
    num_layers: int
    """All of the model's, or the first so many: an early exit."""


@dataclass(frozen=True, slots=True)
class Move:
    sources: tuple[int, ...]
    targets: tuple[int, ...]


Order = Allocate | Forward | Move


def all_reduce(partial: Tensor) -> Tensor:
    """The sum over all ranks, in place; every rank gets the same bits."""
    dist.all_reduce(partial)
    return partial


def join_group(spec: RankSpec, rank: int, store: Store) -> None:
    """Blocks until all ranks are there."""
    device = spec.device_of(rank)
    is_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=spec.size,
        timeout=PATIENCE,
        device_id=device if is_gpu else None,
    )


def share_cores(size: int) -> None:
    """Ranks on one CPU must not run a thread on every core each."""
    native.set_num_threads(max(1, usable_cores() // size))


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    rank: int
    process: "subprocess.Popen[bytes]"
    connection: Connection


class Ranks:
    """The other ranks of a group. One group at a time can be in a process."""

    def __init__(self, spec: RankSpec, members: Sequence[_Member], store: TCPStore) -> None:
        self._spec, self._members, self._store = spec, members, store
        self._closed = False

    @classmethod
    def start(cls, spec: RankSpec) -> "Ranks":
        """Start the processes; they load their weights while this one loads its own. `join` waits for them."""
        if dist.is_initialized():
            raise InvalidConfig("this process already is part of a distributed group: close that engine first")
        if spec.device.type == "cuda":
            have, last = torch.cuda.device_count(), spec.device_of(spec.size - 1)
            if last.index >= have:
                raise InvalidConfig(f"tensor_parallel_size {spec.size} needs {last}, and there are {have} GPUs")
        store = TCPStore(HOST, 0, spec.size, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        ranks = cls(spec, [_spawn(rank) for rank in range(1, spec.size)], store)
        try:
            for member in ranks._members:
                member.connection.send(Start(spec, member.rank, store.port))
        except OSError:
            lost = ranks._lost()
            ranks.close()
            raise lost from None
        if spec.device.type == "cpu":
            share_cores(spec.size)
        return ranks

    @property
    def pids(self) -> list[int]:
        return [member.process.pid for member in self._members]

    def join(self) -> None:
        """Blocks until every rank has its weights and the group stands."""
        for member in self._members:
            wait([member.connection])  # readable when it is closed, too
            try:
                answer = member.connection.recv()
            except (EOFError, OSError):
                raise self._lost() from None
            if isinstance(answer, Failed):
                raise RankLost(f"rank {member.rank} of {self._spec.size} could not start: {answer.reason}")
        with self.watched():
            join_group(self._spec, 0, self._store)

    def tell(self, order: Order) -> None:
        """Send `order` to all of them; they carry orders out one after the other."""
        try:
            for member in self._members:
                if member.process.poll() is not None:
                    raise self._lost()
                member.connection.send(order)
        except OSError:
            raise self._lost() from None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """An error of a collective operation in here is told apart: somebody is gone, or it is a bug of ours."""
        try:
            yield
        except RuntimeError as error:
            if self._first_dead(GRACE_SECONDS) is None:
                raise
            raise self._lost() from error

    def close(self) -> None:
        """End the ranks and leave the group. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for member in self._members:
            member.connection.close()
        for member in self._members:
            try:
                member.process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._spec.device.type == "cpu":
            share_cores(1)

    def _first_dead(self, seconds: float) -> _Member | None:
        """A rank that is gone; its end may come a moment after the connection broke."""
        for member in self._members:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(seconds / len(self._members))
                return member
        return None

    def _lost(self) -> RankLost:
        member = self._first_dead(GRACE_SECONDS)
        if member is None:
            return RankLost(f"a rank of {self._spec.size} does not answer: restart the engine")
        code, reason = member.process.returncode, ""
        with contextlib.suppress(EOFError, OSError):
            while member.connection.poll():
                said = member.connection.recv()
                reason = f": {said.reason}" if isinstance(said, Failed) else reason
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        return RankLost(
            f"rank {member.rank} of {self._spec.size} {how}, and with it a part of the model: restart the engine{reason}"
        )


def _spawn(rank: int) -> _Member:
    # NOTE: not multiprocessing, which runs the caller's main module again: a script without a guard would start itself
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline.models.parallel.rank_process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    return _Member(rank, process, Connection(ours.detach()))
