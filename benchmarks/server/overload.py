"""Ten times more clients than the server can hold, for a minute, on loopback.

    python benchmarks/server/overload.py [--seconds 60] [--running 8] [--waiting 2] [--tokens 48]

First as many clients as running sequences, then ten times the running and waiting requests. Every client sends its
next request after an answer; after a 429 it waits for `Retry-After`. The script fails unless all answers are 200 or
429, no KV block is in use afterwards, and accepted requests take at most twice as long as before.
"""

import argparse
import asyncio
import collections
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request

import psutil
from local_http import post

SERVER = """
import json, sys
from paceline.deploy.load import load_config
from paceline.deploy.serving import serve
sys.exit(serve(load_config(None, {}, json.loads(sys.argv[1])), lambda ready: print(ready.url, flush=True)))
"""


class Load:
    """Clients that send requests without a pause."""

    def __init__(self, port: int, tokens: int) -> None:
        self._port, self._tokens = port, tokens
        self.statuses: collections.Counter[int] = collections.Counter()
        self.latencies: list[float] = []

    async def run(self, clients: int, seconds: float) -> "Load":
        end = time.perf_counter() + seconds
        await asyncio.gather(*(self._client(i, end) for i in range(clients)))
        return self

    async def _client(self, number: int, end: float) -> None:
        body = {"prompt": f"Client {number} tells", "max_tokens": self._tokens, "ignore_eos": True, "stream": True}
        while (started := time.perf_counter()) < end:
            reply = await post("127.0.0.1", self._port, "/v1/completions", body)
            self.statuses[reply.status] += 1
            if reply.status == 200:
                assert b"[DONE]" in reply.body, "a stream ended early"
                self.latencies.append(time.perf_counter() - started)
            elif reply.status == 429:
                wait = float(reply.headers["retry-after"]) * random.uniform(1.0, 1.5)
                await asyncio.sleep(min(wait, max(0.0, end - time.perf_counter())))


def blocks_in_use(url: str) -> float:
    time.sleep(1.0)  # the engine's figures may be half a second old
    with urllib.request.urlopen(url + "/metrics") as response:
        lines = response.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith("paceline_kv_blocks_used")).split()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--waiting", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    clients = 10 * (options.running + options.waiting)
    config = {
        "port": 0,
        "max_num_seqs": options.running,
        "max_waiting": options.waiting,
        "max_model_len": 1024,
        "log_level": "warning",
    }
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, json.dumps(config)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        port = int(url.rpartition(":")[2])
        memory = psutil.Process(process.pid).memory_info
        calm = asyncio.run(Load(port, options.tokens).run(options.running, options.seconds / 4))
        rss, blocks = memory().rss, blocks_in_use(url)
        busy = asyncio.run(Load(port, options.tokens).run(clients, options.seconds))
        time.sleep(0.5)
        rss_after, blocks_after = memory().rss, blocks_in_use(url)
        process.terminate()
        code = process.wait(60)
    print(
        f"{os.cpu_count()} cores, {options.running} running, {options.waiting} waiting, {options.tokens} tokens per request\n"
    )
    print(f"{'':26}{'clients':>8}{'200':>7}{'429':>7}{'other':>7}{'p50 s':>8}{'p99 s':>8}")
    for name, count, load in (("as many as can run", options.running, calm), ("ten times the capacity", clients, busy)):
        other = load.statuses.total() - load.statuses[200] - load.statuses[429]
        p99 = sorted(load.latencies)[int(0.99 * (len(load.latencies) - 1))]
        print(
            f"{name:26}{count:8}{load.statuses[200]:7}{load.statuses[429]:7}{other:7}"
            f"{statistics.median(load.latencies):8.2f}{p99:8.2f}"
        )
    ratio = statistics.median(busy.latencies) / statistics.median(calm.latencies)
    print(f"\nmedian latency of accepted requests: {ratio:.2f}x")
    print(f"blocks in use: {blocks:.0f} before, {blocks_after:.0f} after; exit code {code}")
    print(f"memory: {rss / 2**20:.0f} MiB before, {rss_after / 2**20:.0f} MiB after")
    good = set(busy.statuses) <= {200, 429} and set(calm.statuses) == {200}
    return 0 if good and blocks_after == 0 and ratio <= 2 and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
