"""`python -m paceline.models.parallel.process FD FD`: one rank of a model, connected to rank 0 by two sockets."""

import contextlib
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch
from torch.distributed import TCPStore  # not in its __all__

from paceline.kernels.cpu import native
from paceline.models.decoder import DecoderModel
from paceline.models.loading import build_model, open_checkpoint
from paceline.models.parallel.caches import CacheShape, SharedCache
from paceline.models.parallel.commands import (
    Allocate,
    Command,
    Failed,
    Follow,
    Forward,
    Move,
    Ready,
    Release,
    Settle,
    Settled,
    Share,
    Start,
)
from paceline.models.parallel.group import GROUP_TIMEOUT, RankGroup
from paceline.models.parallel.ranks import HOST, share_cores
from paceline.models.parallel.weights import receive_model, serve_weights
from paceline.models.runner import ModelRunner, build_inputs, early_exit
from paceline.models.shards import Shard

if TYPE_CHECKING:
    from paceline.models.parallel.gpu import Follower


ORPHAN_SECONDS = 20
"""Time for this process to exit after rank 0 has closed its connections."""


def main(fd: int, weights_fd: int) -> int:
    # Rank 0 decides when to stop; a signal to the whole process group must not interrupt its last passes.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    connection, weights = Connection(fd), Connection(weights_fd)
    with contextlib.ExitStack() as at_end:
        try:
            with native.single_threaded_torch():
                serve(connection, weights, at_end)
        except EOFError:  # rank 0 closed the connection
            return 0
        except Exception:
            with contextlib.suppress(OSError):
                connection.send(Failed(traceback.format_exc(limit=-3).strip()))
            return 1
    return 0


@torch.inference_mode()
def serve(connection: Connection, weights: Connection, at_end: contextlib.ExitStack) -> None:
    """Load this rank's share of the model, then execute commands until the connection closes."""
    start: Start = connection.recv()
    spec, device = start.spec, start.spec.device_of(start.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        share_cores(spec.size)
    group = RankGroup(spec, start.rank)
    at_end.callback(group.leave)
    shard = Shard(start.rank, spec.size, group.sum)
    if start.config is None:
        checkpoint = open_checkpoint(spec.model, device, spec.dtype)
        model = build_model(checkpoint, device, spec.dtype, spec.quantization, spec.activations, shard)
    else:
        model = receive_model(weights, start.config, spec, shard)
    threading.Thread(target=_serve_weights, args=(weights, model), name="paceline-weights", daemon=True).start()
    connection.send(Ready())
    group.join(TCPStore(HOST, start.port, spec.size, is_master=False, timeout=GROUP_TIMEOUT))
    caches = Caches(model, group)
    while True:
        command: Command = connection.recv()
        if isinstance(command, Settle):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            connection.send(Settled())
        elif isinstance(command, Share):
            caches.share(command.cache, connection)
        else:
            caches.execute(command)


def _serve_weights(connection: Connection, model: DecoderModel) -> None:
    """As `serve_weights`. Rank 0 is gone then, and this process ends soon, whatever it waits for."""
    serve_weights(connection, model)
    # HAZARD: a GPU in a sum waits for rank 0 forever, and the main thread perhaps for the GPU
    signal.alarm(ORPHAN_SECONDS)


class Caches:
    """The caches of this rank by number, with their runners."""

    def __init__(self, model: DecoderModel, group: RankGroup) -> None:
        self._model, self._group, self._whole = model, group, model.config.num_layers
        self._follower: Follower | None = None
        self._memory: dict[int, SharedCache] = {}
        self._runners: dict[int, dict[int, ModelRunner]] = {}  # by cache and number of layers

    def execute(self, command: Allocate | Release | Move | Forward | Follow) -> None:
        model = self._model
        match command:
            case Allocate():
                shape = CacheShape.of(model.config, command.num_blocks, command.kv_dtype or model.dtype)
                self._memory[command.cache] = memory = SharedCache(shape, model.device)
                runner = ModelRunner(model, command.num_blocks, command.kv_dtype, memory.cache)
                self._runners[command.cache] = {self._whole: runner}
            case Release():
                del self._runners[command.cache]
                if self._follower is not None:
                    self._follower.release(command.cache)
                self._memory.pop(command.cache).close()
            case Move():
                self._runners[command.cache][self._whole].move(command.sources, command.targets)
            case Forward():
                runners = self._runners[command.cache]
                if command.num_layers not in runners:
                    runners[command.num_layers] = early_exit(runners[self._whole], command.num_layers)
                runner, inputs = runners[command.num_layers], build_inputs(command.spans, model.device)
                # rank 0 computes the logits
                runner.model(inputs.tokens, inputs.positions, inputs.layout, runner.cache)
            case Follow():
                if self._follower is None:
                    from paceline.models.parallel.gpu import Follower

                    self._follower = Follower(model, self._group)
                self._follower.follow(command, self._memory[command.work.cache].cache)

    def share(self, cache: int, connection: Connection) -> None:
        self._memory[cache].send(connection)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
