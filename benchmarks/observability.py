"""Cost of observability: metrics, traces, logs, drift test and background audit at their defaults, compared with none of them.

    python benchmarks/observability.py [--repeats 40] [--tokens 64] [--ratio 0.01]
    python benchmarks/observability.py --parts

One process holds an engine and two servers, another the client and a trace collector. The servers alternate in pairs
with the same eight greedy streams at a fixed depth. `on` is scraped once per round, its spans go to the collector and
its log to /dev/null.

Tokens per second vary with other load; the CPU time per token varies less. Both are medians of the ratios of pairs,
with a 95% bootstrap interval. `--parts` times each part alone.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from local_http import LocalServer, complete_all
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from paceline.core.cluster_config import ClusterConfig
from paceline.core.config import EngineConfig, from_mapping
from paceline.core.output import StepOutput, StepTimes
from paceline.core.pool_config import PoolConfig
from paceline.core.request import Request
from paceline.core.sequence import Origin
from paceline.engine.build import build_engine
from paceline.engine.loop import EngineLoop
from paceline.runtime.deploy.directory import FixedDirectory, Member
from paceline.runtime.gateway_client.target_client import TargetClient
from paceline.runtime.json_log import configure_logging
from paceline.runtime.target_worker.worker import TargetWorker
from paceline.runtime.tracing import Tracing
from paceline.runtime.wire.gateway_messages import TO_TARGET_WORKER
from paceline.runtime.wire.transport import Listener
from paceline.server.app import create_app
from paceline.server.auth.access import Access
from paceline.server.config.config import ServerConfig
from paceline.server.config.flags import FlagStore
from paceline.server.gateway.gateway import Gateway
from paceline.server.gateway.models import ServedModels
from paceline.server.metrics.metrics import Metrics
from paceline.speculation.depth.drift import Change, DriftTest

BATCH = 8
PROMPTS = [f"Question {i}: why is the {thing} blue?" for i, thing in enumerate(("sky", "sea", "jay", "whale") * 2)]


class NoMetrics(Metrics):
    """Metrics that do nothing."""

    def record_submit(self, request: Request) -> None:
        pass

    def record_outputs(self, outputs: Sequence[tuple[Request, StepOutput]], now: float) -> None:
        pass

    def record_finish(self, request: Request, reason: str, now: float) -> None:
        pass


class NoDrift:
    """A drift test that does nothing."""

    def observe(self, category: str, sequence_id: int, accepted: bool) -> Change | None:
        return None

    def close(self, sequence_ids: object) -> list[Change]:
        return []


def client() -> None:
    """Print the collector's port; then send the body of each input line with every prompt and print tokens and seconds."""

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    for line in sys.stdin:
        port, body = json.loads(line)
        print(json.dumps(asyncio.run(complete_all(port, body, PROMPTS))), flush=True)


class Side:
    """One of the two servers, and the engine's settings for it."""

    def __init__(self, target: TargetClient, loop: EngineLoop, is_on: bool, tracing: Tracing) -> None:
        self._loop, self._is_on, self._tracing = loop, is_on, tracing
        engine = loop.engine
        self._drift = engine.speculator.traffic.drift if is_on else NoDrift()
        config = ServerConfig(engine=target.config, log_requests="ids" if is_on else "none")
        metrics = Metrics("smollm2") if is_on else NoMetrics("smollm2")
        metrics.add_engine(target.engine_status)
        gateway = Gateway(target, config, metrics, FlagStore())
        app = create_app(
            ServedModels([gateway]), Access.from_config(config, time.monotonic), tracing if is_on else None
        )
        self._server = LocalServer(app)
        self.port = self._server.port

    def enter(self) -> None:
        """Switch the engine to this side; call it while no request runs."""
        done = threading.Event()

        def switch() -> None:
            engine = self._loop.engine
            engine.speculator.traffic.drift = self._drift  # type: ignore[assignment]
            engine.hooks.remove(engine.audit)
            if self._is_on:
                engine.hooks.add(engine.audit)
            done.set()

        self._loop.call(switch)
        done.wait()
        self._loop.tracer = self._tracing if self._is_on else None

    def leave(self) -> None:
        if self._is_on:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as page:
                page.read()

    def close(self) -> None:
        self._server.close()


@contextmanager
def local_worker(config: EngineConfig) -> Iterator[tuple[TargetClient, EngineLoop]]:
    """A target worker on threads of this process, so that the engine's parts can be exchanged between two runs."""
    loop = EngineLoop(build_engine(config))
    worker = TargetWorker("engine-0", loop, Listener("tcp://127.0.0.1:0", TO_TARGET_WORKER))
    thread = threading.Thread(target=worker.run)
    thread.start()
    members = FixedDirectory((Member("engine-0", "engine", "target", worker.address),))
    try:
        with TargetClient(
            ClusterConfig((PoolConfig("engine", "target", config.model),)), members, engine=config
        ) as target:
            yield target, loop
    finally:
        worker.stop()
        thread.join()


def interval(values: list[float]) -> tuple[float, float, float]:
    """The median and its 95% bootstrap interval."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[1949]


def parts() -> None:
    """Print the CPU time of each part for one sequence."""
    request, times = Request("r", (1, 2, 3)), StepTimes(1.0, 2.0, 3.0)
    output = StepOutput("r", 0, 0, (1, 2, 3), (Origin.ACCEPTED,) * 3, "abc", 3, 2, method="ngram", times=times)
    metrics, drift = Metrics("m"), DriftTest()
    metrics.record_submit(request)
    tracing = Tracing(InMemorySpanExporter(), "bench")
    trace = tracing.follow(replace(request, trace=f"00-{'1' * 32}-{'1' * 16}-01"))
    trace.add(output)
    rounds = 50

    def timed(what: str, count: int, call: Callable[[int], object]) -> None:
        started = time.process_time()
        for i in range(count):
            call(i)
        print(f"{what:32}{1e6 * (time.process_time() - started) / count:8.2f} µs")

    timed("metrics, per step", 20000, lambda i: metrics.record_outputs([(request, output)], 1e-3 * i))
    timed("drift test, per round", 20000, lambda i: drift.observe("c", i // rounds, i % 3 > 0))
    timed("drift test, per finished sequence", 20000 // rounds, lambda i: drift.close([i]))
    timed("trace, per round", 2000, lambda i: trace.add(output))
    tracing.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--ratio", type=float, default=ServerConfig().trace_ratio, help="share of requests traced")
    parser.add_argument("--parts", action="store_true", help="CPU time of each part alone")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client or options.parts:
        client() if options.client else parts()
        return
    configure_logging("info", open(os.devnull, "w"))  # noqa: SIM115
    logging.captureWarnings(False)
    body = {"temperature": 0, "max_tokens": options.tokens, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    speculation = {"depth": "fixed", "max_depth": 3, "method": "ngram"}
    settings = {"model": "smollm2", "max_num_seqs": BATCH, "max_model_len": 1024, "speculation": speculation}
    config = from_mapping(EngineConfig, settings)
    rates: dict[str, list[float]] = {"off": [], "on": []}
    costs: dict[str, list[float]] = {"off": [], "on": []}
    with (
        subprocess.Popen(
            [sys.executable, __file__, "--client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
        local_worker(config) as (target, loop),
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        with Tracing.to(f"http://127.0.0.1:{int(process.stdout.readline())}", "bench", options.ratio) as tracing:
            sides = {"off": Side(target, loop, False, tracing), "on": Side(target, loop, True, tracing)}
            for repeat in range(-2, options.repeats):  # two warm-up rounds
                for name in ("off", "on") if repeat % 2 else ("on", "off"):
                    side = sides[name]
                    side.enter()
                    busy = time.process_time()
                    print(json.dumps([side.port, body]), file=process.stdin, flush=True)
                    result = json.loads(process.stdout.readline())
                    side.leave()
                    if repeat >= 0:
                        rates[name].append(result["tokens"] / result["seconds"])
                        costs[name].append((time.process_time() - busy) / result["tokens"])
            for side in sides.values():
                side.close()
            process.stdin.close()
    print(f"{os.cpu_count()} cores, batch {BATCH}, {options.tokens} tokens each, {options.repeats} pairs, ", end="")
    print(f"{options.ratio:g} of the requests traced\n")
    print(f"{'':5}{'tok/s':>9}{'CPU ms/token':>14}   medians")
    for name in rates:
        print(f"{name:5}{statistics.median(rates[name]):9.1f}{1e3 * statistics.median(costs[name]):14.3f}")
    slower = [1 - on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    additional = [on / off - 1 for on, off in zip(costs["on"], costs["off"], strict=True)]
    for what, values in (("tokens per second lost", slower), ("additional CPU time per token", additional)):
        median, low, high = interval(values)
        print(f"{what}: {median:.2%} ({low:.2%} to {high:.2%})")


if __name__ == "__main__":
    main()
