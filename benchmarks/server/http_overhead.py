"""Cost of HTTP: eight concurrent requests over loopback, compared with the same eight given to the engine, in turns.

    python benchmarks/server/http_overhead.py [--tokens 128] [--repeats 7] [--speculation]

The engine, the server and the client are three processes, as with `paceline serve`. All paths generate the same greedy tokens.
The client runs on the same cores and is part of the result.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from queue import SimpleQueue
from typing import Any

from local_http import LocalServer, complete_all

from paceline.core.config import EngineConfig
from paceline.core.errors import PacelineError
from paceline.core.output import OutputEvent
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.core.speculation import SpeculationParams
from paceline.runtime.deploy.engine_process import running_engine
from paceline.runtime.gateway_client.target_client import TargetClient
from paceline.server.app import create_app
from paceline.server.auth.access import Access
from paceline.server.config.config import ServerConfig
from paceline.server.config.flags import FlagStore
from paceline.server.gateway.gateway import Gateway
from paceline.server.gateway.models import ServedModels
from paceline.server.metrics.metrics import Metrics

BATCH = 8
PROMPTS = [
    f"Question {i}: {text}"
    for i, text in enumerate(
        (
            "why is the sky blue?",
            "who wrote Faust?",
            "how do bees find home?",
            "what is a prime number?",
            "how is cheese made?",
            "what does a compiler do?",
            "where do rivers end?",
            "when was paper invented?",
        )
    )
]


def client(port: int) -> None:
    """Send the body on each input line with every prompt; print tokens and seconds."""
    for line in sys.stdin:
        print(json.dumps(asyncio.run(complete_all(port, json.loads(line), PROMPTS))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--speculation", action="store_true", help="with speculation; the depth then varies")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(options.client)
        return
    speculation = {"enabled": options.speculation}
    sampling = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    body = {"temperature": 0, "max_tokens": options.tokens, "ignore_eos": True, "speculation": speculation}
    paths: dict[str, dict[str, Any] | None] = {
        "engine alone": None,
        "HTTP, whole answers": body,
        "HTTP, streamed": {**body, "stream": True, "stream_options": {"include_usage": True}},
    }
    rates: dict[str, list[float]] = {path: [] for path in paths}
    shares: dict[str, list[float]] = {path: [] for path in paths}
    config = EngineConfig("smollm2", max_num_seqs=BATCH, prefix_caching=False, max_model_len=1024)
    with running_engine(config, log_level="warning") as engine, engine.connect() as target:
        server = start_server(target)
        assert server.thread.ident is not None
        clock = time.pthread_getcpuclockid(server.thread.ident)
        with subprocess.Popen(
            [sys.executable, __file__, "--client", str(server.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            for repeat in range(options.repeats + 1):
                for path, request in paths.items():
                    busy, began = time.clock_gettime(clock), time.perf_counter()
                    if request is None:
                        started = time.perf_counter()
                        tokens = generate(target, sampling, SpeculationParams(**speculation))
                        rate = tokens / (time.perf_counter() - started)
                    else:
                        assert process.stdin is not None
                        assert process.stdout is not None
                        print(json.dumps(request), file=process.stdin, flush=True)
                        result = json.loads(process.stdout.readline())
                        rate = result["tokens"] / result["seconds"]
                    if repeat:  # the first round is a warm-up
                        rates[path].append(rate)
                        shares[path].append((time.clock_gettime(clock) - busy) / (time.perf_counter() - began))
            assert process.stdin is not None
            process.stdin.close()
    print(f"{os.cpu_count()} cores, batch {BATCH}, {options.tokens} tokens each, {options.repeats} rounds in turns\n")
    print(f"{'':22}{'tok/s':>9}{'overhead':>10}{'server':>9}   medians; server: its thread's share of one core")
    for path, values in rates.items():
        overhead = statistics.median(
            1 - value / alone for value, alone in zip(values, rates["engine alone"], strict=True)
        )
        print(f"{path:22}{statistics.median(values):9.1f}{overhead:10.1%}{statistics.median(shares[path]):9.1%}")


def generate(target: TargetClient, sampling: SamplingParams, speculation: SpeculationParams) -> int:
    """Generate for all prompts without HTTP; returns the number of tokens."""
    events: SimpleQueue[OutputEvent] = SimpleQueue()
    for i, prompt in enumerate(PROMPTS):
        request = Request(f"direct-{i}", tuple(target.tokenizer.encode(prompt)), sampling, speculation)
        target.submit(target.validate(request), events.put)
    tokens, running = 0, len(PROMPTS)
    while running:
        event = events.get()
        if isinstance(event, PacelineError):
            raise event
        tokens += len(event.tokens)
        running -= event.finish_reason is not None
    return tokens


def start_server(target: TargetClient) -> LocalServer:
    config = ServerConfig(engine=target.config)
    gateway = Gateway(target, config, Metrics("smollm2"), FlagStore())
    return LocalServer(create_app(ServedModels([gateway]), Access.from_config(config, time.monotonic)))


if __name__ == "__main__":
    main()
