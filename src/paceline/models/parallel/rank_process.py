"""`python -m paceline.models.parallel.rank_process FD`: one rank of a model, connected to rank 0 by the socket FD."""

import contextlib
import signal
import sys
import traceback
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # not in its __all__

from paceline.kernels.cpu import native
from paceline.models.loading.load import build_model, open_checkpoint
from paceline.models.parallel.ranks import (
    GROUP_TIMEOUT,
    HOST,
    Allocate,
    Failed,
    Forward,
    Move,
    Ready,
    Start,
    all_reduce,
    join_group,
    share_cores,
)
from paceline.models.parallel.shards import Shard
from paceline.models.runner import ModelRunner, build_inputs, early_exit


def main(fd: int) -> int:
    # Rank 0 decides when to stop; a signal to the whole process group must not interrupt its last passes.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    connection = Connection(fd)
    try:
        with native.single_threaded_torch():
            serve(connection)
    except EOFError:  # rank 0 closed the connection
        return 0
    except Exception:
        with contextlib.suppress(OSError):
            connection.send(Failed(traceback.format_exc(limit=-3).strip()))
        return 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


@torch.inference_mode()
def serve(connection: Connection) -> None:
    """Load this rank's share of the model, then execute commands until the connection closes."""
    start: Start = connection.recv()
    spec, device = start.spec, start.spec.device_of(start.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        share_cores(spec.size)
    shard = Shard(start.rank, spec.size, all_reduce)
    checkpoint = open_checkpoint(spec.model, device, spec.dtype)
    model = build_model(checkpoint, device, spec.dtype, spec.quantization, spec.activations, shard)
    connection.send(Ready())
    join_group(spec, start.rank, TCPStore(HOST, start.port, spec.size, is_master=False, timeout=GROUP_TIMEOUT))
    runners: dict[int, ModelRunner] = {}  # number of layers -> runner
    whole = model.config.num_layers
    while True:
        command = connection.recv()
        if isinstance(command, Allocate):
            runners = {whole: ModelRunner(model, command.num_blocks, command.kv_dtype)}
        elif isinstance(command, Move):
            runners[whole].move(command.sources, command.targets)
        elif isinstance(command, Forward):
            runner = runners.get(command.num_layers)
            if runner is None:
                runner = runners[command.num_layers] = early_exit(runners[whole], command.num_layers)
            inputs = build_inputs(command.spans, device)
            runner.model(inputs.tokens, inputs.positions, inputs.layout, runner.cache)  # rank 0 computes the logits


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
