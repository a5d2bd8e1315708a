"""`python -m paceline.models.parallel.rank_process FD`: one rank of a model; the socket FD connects it to rank 0."""

import contextlib
import signal
import sys
import traceback
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

from paceline.kernels.cpu import native
from paceline.models.loading.load import build_model, open_checkpoint
from paceline.models.parallel.ranks import (
    HOST,
    PATIENCE,
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
from paceline.models.runner import ModelRunner, build_inputs
from paceline.models.runners import early_exit


def main(fd: int) -> int:
    # Rank 0 decides when to end; a signal to the whole process group must not cut its last answers short.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)
    connection = Connection(fd)
    try:
        with native.quiet_torch():
            serve(connection)
    except EOFError:  # rank 0 is done with us
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
    """Load this rank's share, then carry out orders until the connection ends."""
    start: Start = connection.recv()
    spec, device = start.spec, start.spec.device_of(start.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        share_cores(spec.size)
    shard = Shard(start.rank, spec.size, all_reduce)
    model = build_model(open_checkpoint(spec.model, device, spec.dtype), device, spec.dtype, spec.quantization, shard)
    connection.send(Ready())
    join_group(spec, start.rank, TCPStore(HOST, start.port, spec.size, is_master=False, timeout=PATIENCE))
    runners: dict[int, ModelRunner] = {}  # by the number of layers they run
    whole = model.config.num_layers
    while True:
        order = connection.recv()
        if isinstance(order, Allocate):
            runners = {whole: ModelRunner(model, order.num_blocks, order.kv_dtype)}
        elif isinstance(order, Move):
            runners[whole].move(order.sources, order.targets)
        elif isinstance(order, Forward):
            runner = runners.get(order.num_layers)
            if runner is None:
                runner = runners[order.num_layers] = early_exit(runners[whole], order.num_layers)
            rows = build_inputs(order.spans, device)
            runner.model(rows.tokens, rows.positions, rows.layout, runner.cache)  # no logits: rank 0 has the head


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
