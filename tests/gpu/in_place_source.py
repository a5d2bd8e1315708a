"""A worker in a process of its own, whose device memory the tests read in place.

`python -m tests.gpu.in_place_source KIND DEVICE [MODEL]` prints one line of JSON when it is ready, and one for each line of its
input. It exits at the end of the input.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from paceline.engine.engine import Engine
from paceline.model_files.checksums import quick_checksum
from paceline.models.loading.load import load_model
from paceline.models.manifest.manifest import ExportedWeights, weight_form
from paceline.models.runners import make_runner
from paceline.transfer.memory import device_memory
from paceline.transfer.weights.server import WeightServer
from paceline.wire.transfer_messages import MemoryRegion
from tests.engine.harness import letters
from tests.fakes import tiny_engine, tiny_model
from tests.worker.handoff.test_handoffs import PrefillWorker

DTYPE = torch.bfloat16


class Source:
    """The process, from the side of a test."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.first = self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the source process failed; its error is above"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self) -> dict[str, Any]:
        """Its current figures."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self.read()

    @property
    def region(self) -> MemoryRegion:
        return msgspec.json.decode(json.dumps(self.first["region"]), type=MemoryRegion)


@contextmanager
def source(kind: str, device: str, *arguments: str) -> Iterator[Source]:
    command = [sys.executable, "-m", "tests.gpu.in_place_source", kind, device, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Source(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def tiny(device: str) -> Engine:
    """Equal in both processes."""
    built = tiny_engine(tiny_model(device=device), None, 6, runner_kind=make_runner)
    built.tokenizer = built.validator._tokenizer = letters()
    return built


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def share_tensor(device: str) -> None:
    memory = device_memory(torch.device(device), None)
    assert memory is not None
    padding = torch.zeros(1000, device=device)  # so that the region is not the start of an allocation
    values = torch.arange(1 << 20, dtype=torch.int32, device=device)
    torch.cuda.synchronize()
    say(region=json.loads(msgspec.json.encode(memory.share(values))), unused=padding.numel())
    for _ in sys.stdin:
        values += 1
        torch.cuda.synchronize()
        say(sum=int(values.sum()))


def prefill(device: str) -> None:
    engine = tiny(device)
    worker = PrefillWorker("p", engine, memory=device_memory(engine.runner.device, None))
    say(address=worker.worker.address)
    for _ in sys.stdin:
        counts = worker.service.counts()
        pool = engine.scheduler.tables.pool
        say(done=counts.done, in_place=counts.in_place_bytes, held=pool.num_blocks - pool.num_free)
    worker.stop()


def weights(device: str, model: str) -> None:
    where = torch.device(device)
    loaded = load_model(model, where, DTYPE, None)
    exported = ExportedWeights(loaded, weight_form(where, DTYPE, None), quick_checksum(model))
    server = WeightServer("tcp://127.0.0.1:0", None)
    server.open(exported, memory=device_memory(where, None))
    say(address=server.address)
    for _ in sys.stdin:
        say(bytes=server.num_bytes, in_place=server.num_in_place_bytes)
    server.close()


if __name__ == "__main__":
    {"tensor": share_tensor, "prefill": prefill, "weights": weights}[sys.argv[1]](*sys.argv[2:])
