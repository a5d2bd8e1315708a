"""The sending worker of device_copies.py, a process of its own: an engine that serves its weights and its cached prompt.

It prints one line of JSON when it is ready, and one for each line of its input: `decode N` starts N streams, `end` ends them
and prints the times of their tokens, `bytes` prints the bytes of weights that were read in place.
"""

import argparse
import faulthandler
import itertools
import json
import os
import sys
import threading
import time
import traceback
from queue import SimpleQueue
from typing import Any

import torch

from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.core.errors import PacelineError
from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.engine.build import build_engine, pick_dtype
from paceline.engine.loop import EngineLoop
from paceline.models.loading.checksums import quick_checksum
from paceline.models.loading.load import LoadedModel, load_model
from paceline.models.loading.weight_manifest import ExportedWeights, weight_form
from paceline.runtime.handoff.prefill_service import PrefillService
from paceline.runtime.target_worker.worker import TargetWorker
from paceline.runtime.transfer.device_memory import device_memory
from paceline.runtime.transfer.server import TransferServer
from paceline.runtime.weights.send_rate import Activity
from paceline.runtime.weights.server import WeightServer
from paceline.runtime.wire.gateway_messages import TO_TARGET_WORKER
from paceline.runtime.wire.transport import Listener

ANY = "tcp://127.0.0.1:0"
WARM_TOKENS = 16
STREAM_TOKENS = 4096
_NUMBERS = itertools.count()


def config(options: argparse.Namespace) -> EngineConfig:
    """The engine of both processes."""
    return EngineConfig(
        model=options.model,
        draft=None,
        device=options.device,
        max_num_seqs=8,
        max_batched_tokens=2048,
        max_model_len=options.prompt + STREAM_TOKENS + 64,
        kv_tokens=2 * (options.prompt + 16) + 8 * (STREAM_TOKENS + 64),
        audit_fraction=0.0,
        speculation=SpeculationConfig(enabled=False),
    )


def prompt_ids(count: int) -> tuple[int, ...]:
    return tuple(1000 + (7 * i + i // 13) % 5000 for i in range(count))


def greedy(name: str, ids: tuple[int, ...], tokens: int) -> Request:
    return Request(name, ids, SamplingParams(max_tokens=tokens, temperature=0.0, seed=0, ignore_eos=True))


def generate(loop: EngineLoop, request: Request) -> list[int]:
    """The tokens of a request, when all are there."""
    events: SimpleQueue[StepOutput | PacelineError] = SimpleQueue()
    loop.submit(request, events.put)
    tokens: list[int] = []
    while True:
        event = events.get()
        if isinstance(event, PacelineError):
            raise event
        tokens += event.tokens
        if event.finish_reason is not None:
            return tokens


class Streams:
    """Requests that decode, and the times of their tokens."""

    def __init__(self, loop: EngineLoop, count: int) -> None:
        self._loop, self._names = loop, [f"stream-{next(_NUMBERS)}" for _ in range(count)]
        self.times: list[list[float]] = [[] for _ in self._names]
        warm = [threading.Event() for _ in self._names]
        for i, name in enumerate(self._names):

            def listen(event: StepOutput | PacelineError, i: int = i) -> None:
                if isinstance(event, StepOutput):
                    self.times[i] += [time.perf_counter()] * len(event.tokens)
                if isinstance(event, PacelineError) or len(self.times[i]) >= WARM_TOKENS:
                    warm[i].set()

            loop.submit(greedy(name, prompt_ids(64 + i)[i:], STREAM_TOKENS), listen)
        for one in warm:
            one.wait()

    def end(self) -> list[list[float]]:
        for name in self._names:
            self._loop.cancel(name)
        return self.times


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--limit", type=float, required=True)
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.limit, exit=True)
    kept: list[LoadedModel] = []

    def load(*arguments: Any) -> LoadedModel:
        kept.append(load_model(*arguments))
        return kept[0]

    engine = build_engine(config(options), load=load)
    device = engine.runner.device
    exported = ExportedWeights(
        kept[0], weight_form(device, pick_dtype("auto", device), None), quick_checksum(options.model)
    )
    weights = WeightServer(ANY, None)
    memory = device_memory(device, None)
    opening = threading.Thread(
        target=weights.open, args=(exported, lambda: Activity(engine.has_work, engine.num_steps), memory)
    )
    loop = EngineLoop(engine)
    loop.run(engine.warm_up)
    opening.start()  # reads all weights once, for their checksums
    cached = prompt_ids(options.prompt)
    tokens = generate(loop, greedy("cached", cached, 8))
    service = PrefillService(loop, TransferServer("127.0.0.1", None), computes=False, memory=memory)
    worker = TargetWorker("source", loop, Listener(ANY, TO_TARGET_WORKER), prefill_service=service)
    serving = threading.Thread(target=worker.run)
    serving.start()
    opening.join()
    nbytes = sum(part.nbytes for part in exported.manifest.parts)
    say(address=worker.address, weights=weights.address, tokens=tokens, bytes=nbytes, device=str(device))
    streams: Streams | None = None
    for line in sys.stdin:
        match line.split():
            case ["decode", count]:
                streams = Streams(loop, int(count))
                say(started=True)
            case ["end"] if streams is not None:
                say(times=streams.end())
            case ["bytes"]:
                say(in_place=weights.num_in_place_bytes)
    weights.close()
    worker.stop()
    serving.join(10.0)


if __name__ == "__main__":
    torch.set_num_threads(min(8, torch.get_num_threads()))
    try:
        main()
    except Exception:
        traceback.print_exc()
        os._exit(1)  # other threads would keep the process
