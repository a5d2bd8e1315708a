"""CPU time of one output between the engine and the client: worker messages, gateway, HTTP.

    python benchmarks/server/output_path.py [--streams 256] [--tokens 100] [--rate 50] [--drafted 0]

A child process plays a target worker: it sends one output for every stream, `--rate` times a second, through the code that a
worker uses. This process runs the gateway and its HTTP server. A third process reads all streams. The figures are CPU time,
so that other load on the machine changes them little.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from local_http import LocalServer, complete_all

from paceline.core.cluster_config import ClusterConfig
from paceline.core.config import EngineConfig
from paceline.core.machine import freeze_loaded_objects
from paceline.core.output import StepOutput
from paceline.core.pool_config import PoolConfig
from paceline.core.request import SpeculationFlags
from paceline.core.sequence import FinishReason, Origin
from paceline.core.status import EngineStatus
from paceline.gateway.auth.access import Access
from paceline.gateway.config.config import ServerConfig
from paceline.gateway.config.flags import FlagStore
from paceline.gateway.http.app import create_app
from paceline.gateway.metrics.metrics import Metrics
from paceline.gateway.sessions.gateway import Gateway
from paceline.gateway.sessions.models import ServedModels
from paceline.model_files.tokenizer.gguf_tokenizer import load_tokenizer
from paceline.targets.client import TargetClient
from paceline.wire.draft_messages import VERSION, Hello
from paceline.wire.gateway_messages import (
    TO_TARGET_WORKER,
    Cancel,
    Heartbeat,
    HeartbeatRequest,
    StatusReport,
    StatusRequest,
    Submit,
    Welcome,
)
from paceline.wire.transport import Listener, Peer
from paceline.wire.worker_spec import FixedDirectory, Member
from paceline.worker.server.gateways import GatewaySession, Submission

MODEL = "smollm2"
KV_BLOCKS = 1_000_000
TEXT = "The quick brown fox jumps over the lazy dog while the river runs to the sea. "


class FakeWorker:
    """Answers a gateway like a target worker, and sends outputs of a fixed text at a fixed rate."""

    def __init__(self, address: str, rate: float, drafted: int) -> None:
        self._tokenizer = load_tokenizer(MODEL)
        self._text = self._tokenizer.encode(TEXT * 20, add_special=False)
        self._listener = Listener(address, TO_TARGET_WORKER)
        self._rate, self._drafted = rate, drafted
        self._jobs: dict[int, tuple[Submission, int]] = {}
        self._gateway, self._peer = GatewaySession(), Peer()
        self._seconds, self._count = 0.0, 0

    def run(self) -> None:
        next_step = time.monotonic()
        while True:
            received = self._listener.receive(max(0.0, next_step - time.monotonic()))
            if received is not None:
                self._handle(received.peer, received.message)
            if time.monotonic() >= next_step:
                next_step = max(time.monotonic(), next_step + 1.0 / self._rate)
                self._step()

    def _handle(self, peer: Peer, message: Any) -> None:
        self._peer = peer
        match message:
            case Hello():
                vocabulary = self._tokenizer.vocab_size
                self._listener.send(
                    peer, Welcome(VERSION, 1, "engine-0", "", vocabulary, 8192, 1024, 8, ["ngram"], "ngram")
                )
            case HeartbeatRequest():
                alive = list(self._jobs)
                self._listener.send(peer, Heartbeat(message.nonce, 1, 0, False, 0, 0, 0, KV_BLOCKS, attempts=alive))
            case StatusRequest():
                status = EngineStatus(0, 0, 0, KV_BLOCKS, 0, 0, SpeculationFlags(True, "ngram", 8), ())
                self._listener.send(peer, StatusReport(1, "engine-0", status))
            case Submit():
                job = self._gateway.submit(message.attempt, message.request)
                self._jobs[message.attempt] = job, message.request.sampling.max_tokens
            case Cancel():
                for attempt in message.attempts:
                    self._jobs.pop(attempt, None)
            case _:
                pass

    def _step(self) -> None:
        steps = []
        for attempt, (job, limit) in list(self._jobs.items()):
            done = job.num_tokens[0]
            tokens = tuple(self._text[done % 200 : done % 200 + min(1 + self._drafted, limit - done)])
            reason = FinishReason.LENGTH if done + len(tokens) == limit else None
            origins = (Origin.ACCEPTED,) * (len(tokens) - 1) + (Origin.BONUS,)
            accepted = len(tokens) - 1
            steps.append(
                (job, StepOutput("r", 0, 0, tokens, origins, "", self._drafted, accepted, finish_reason=reason))
            )
            if reason is not None:
                del self._jobs[attempt]
        began = time.thread_time()
        for job, output in steps:
            job.put(output)
        self._gateway.flush(lambda message: self._listener.send(self._peer, message))
        self._seconds, self._count = self._seconds + time.thread_time() - began, self._count + len(steps)
        if steps and not self._jobs:
            print(json.dumps([self._seconds, self._count]), flush=True)
            self._seconds, self._count = 0.0, 0


def client(port: int) -> None:
    """Send the body on each input line, as many times as it says; print tokens and seconds."""
    for line in sys.stdin:
        streams, body = json.loads(line)
        prompts = [f"Question {i}" for i in range(streams)]
        print(json.dumps(asyncio.run(complete_all(port, body, prompts))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rate", type=float, default=50.0, help="steps per second")
    parser.add_argument("--drafted", type=int, default=0, help="accepted draft tokens of every step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        FakeWorker(options.worker, options.rate, options.drafted).run()
    elif options.client:
        client(options.client)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{Path(folder) / 'engine'}"
        flags = ["--rate", str(options.rate), "--drafted", str(options.drafted)]
        worker = subprocess.Popen(
            [sys.executable, __file__, "--worker", address, *flags], stdout=subprocess.PIPE, text=True
        )
        assert worker.stdout is not None
        config = ServerConfig(max_waiting=1024, log_requests="none", engine=EngineConfig(MODEL))
        directory = FixedDirectory((Member("engine-0", "engine", "target", address),))
        try:
            with TargetClient(
                ClusterConfig((PoolConfig("engine", "target", MODEL),)), directory, engine=config.engine
            ) as target:
                gateway = Gateway(target, config, Metrics(MODEL), FlagStore())
                server = LocalServer(create_app(ServedModels([gateway]), Access.from_config(config, time.monotonic)))
                freeze_loaded_objects()  # as `paceline serve` does
                run(options, server, worker)
                server.close()
        finally:
            worker.kill()
            worker.wait()


def run(options: argparse.Namespace, server: LocalServer, worker: "subprocess.Popen[str]") -> None:
    body = {"temperature": 0, "max_tokens": options.tokens, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    assert server.thread.ident is not None
    assert worker.stdout is not None
    loop_clock = time.pthread_getcpuclockid(server.thread.ident)
    print(f"{os.cpu_count()} cores, {options.streams} streams, {options.tokens} tokens, {options.rate:g} steps/s\n")
    print(f"{'':5}{'tok/s':>10}{'worker':>10}{'gateway':>10}{'HTTP':>10}   µs of CPU per output")
    with subprocess.Popen(
        [sys.executable, __file__, "--client", str(server.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for repeat in range(options.repeats):
            total, http = time.process_time(), time.clock_gettime(loop_clock)
            print(json.dumps([options.streams, body]), file=process.stdin, flush=True)
            result = json.loads(process.stdout.readline())
            total, http = time.process_time() - total, time.clock_gettime(loop_clock) - http
            seconds, count = 0.0, 0
            while count < options.streams * (options.tokens // (1 + options.drafted)):
                more = json.loads(worker.stdout.readline())
                seconds, count = seconds + more[0], count + more[1]
            each = [1e6 * value / count for value in (seconds, total - http, http)]
            rate = result["tokens"] / result["seconds"]
            print(f"{repeat:5}{rate:10.0f}{each[0]:10.2f}{each[1]:10.2f}{each[2]:10.2f}", flush=True)
        process.stdin.close()


if __name__ == "__main__":
    main()
