"""Swaps the draft inside a server under load, to a better and to a worse one, and compares every text with plain decoding.

    python benchmarks/live/draft_swap.py --draft smollm2-eagle --noise 0.5

    python benchmarks/live/draft_swap.py --pool --clients 2

The server starts with one of two drafts, a few clients stream without a pause, and `paceline draft swap` tries the other:
inside the engine, or with `--pool` in a draft pool of one worker. Inside the engine the target is the embedded model, and the
worse draft has the weights of the better one plus noise. The models of the pool are those of `live.py`.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from live_models import write_models
from safetensors.torch import load_file, save_file

from paceline.model_files.hub.hub import find_model

KEY = "benchmark-key"
REASON = re.compile(r"(draft drafts with|draft keeps|the server).*")
LAYERS = 48
"""Layers of the target of a pool."""
NEVER = 1 << 30
"""Lossy windows that open a circuit breaker, if none should."""
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village,",
    "List three colours: red,",
    "To make a good cup of tea, first",
    "SELECT name, price FROM",
    "The three laws of motion are",
    "Dear customer, thank you for",
    "import numpy as np\n\n\ndef mean(values):\n",
    "In 1969 the first people",
    "A balanced breakfast contains",
    "The difference between TCP and UDP is",
)


@dataclass(frozen=True)
class Drafts:
    """A target and two drafts for it."""

    target: str
    better: str
    worse: str


def worsened(draft: str, folder: Path, noise: float) -> str:
    """A folder with the draft plus noise of `noise` standard deviations of each matrix."""
    source, generator = find_model(draft), torch.Generator().manual_seed(0)
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    for name, values in tensors.items():
        if values.is_floating_point() and values.dim() == 2:
            wide = values.float()
            tensors[name] = (wide + noise * wide.std() * torch.randn(wide.shape, generator=generator)).to(values.dtype)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def cluster(target_model: str, draft: str, folder: Path, depth: int | None) -> dict[str, Any]:
    """A target and a draft worker as processes of this machine."""
    limits = {"max_num_seqs": 16, "max_model_len": 1024, "kv_tokens": 8192}
    speculation = (
        {}
        if depth is None
        else {
            "depth": "fixed",
            "max_depth": depth,
            "breaker_rounds": NEVER,
        }
    )
    target = {"name": "target", "role": "target", "model": target_model, "devices": ["cpu"], "limits": limits}
    pool = {"name": "draft", "role": "draft", "model": draft, "placement": {"with": "target"}, "limits": limits}
    pools = [{**target, "speculation": speculation}, pool]
    return {"name": "draft-swap", "state_dir": str(folder / "state"), "pools": pools}


class Server:
    """`paceline serve` with a draft, in its engine or in a pool."""

    def __init__(self, pair: Drafts, draft: str, folder: Path, arguments: argparse.Namespace) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self._file = f"http://127.0.0.1:{port}", folder / "cluster.yaml"
        options = ["--draft", draft]
        if arguments.pool:
            self._file.write_text(json.dumps(cluster(pair.target, draft, folder, arguments.depth)))
            options = ["--config", str(self._file)]
        elif arguments.depth is not None:
            options += ["--speculation-depth", "fixed", "--speculation-max-depth", str(arguments.depth)]
            options += ["--speculation-breaker-rounds", str(NEVER)]
        command = [sys.executable, "-m", "paceline", "serve", "--port", str(port), *options]
        self._process = subprocess.Popen(command, env={**os.environ, "PACELINE_ADMIN_KEY": KEY})
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/ready", timeout=5).close()
                return
            except OSError:
                assert self._process.poll() is None, "the server has stopped"
                time.sleep(0.5)

    def complete(self, case: int, tokens: int, is_plain: bool = False) -> str:
        body: dict[str, Any] = {
            "prompt": PROMPTS[case % len(PROMPTS)],
            "temperature": 0.8 * (case % 2),
            "seed": case,
            "max_tokens": tokens,
            "ignore_eos": True,
            "speculation": {"enabled": not is_plain},
        }
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            text: str = json.load(answer)["choices"][0]["text"]
        return text

    def swap(self, candidate: str, arguments: argparse.Namespace) -> tuple[int, str]:
        """Exit status and output of `paceline draft swap`."""
        command = [sys.executable, "-m", "paceline", "draft", "swap", "--seconds", str(arguments.seconds)]
        if arguments.pool:
            command += ["draft", candidate, "--config", str(self._file)]
        else:
            command += ["--server", self.url, candidate, "--api-key", KEY, "--period", str(arguments.period)]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
        words = " ".join(done.stdout.split())
        found = REASON.search(words)  # after the table of workers
        return done.returncode, found[0] if found else words

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


class Load:
    """Clients without a pause; each text is compared with that of plain decoding."""

    def __init__(self, server: Server, clients: int, tokens: int, expected: dict[int, str]) -> None:
        self.finished, self.different, self.errors = 0, 0, 0
        self._server, self._tokens, self._expected = server, tokens, expected
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._next = 0
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                case, self._next = self._next % len(self._expected), self._next + 1
            try:
                text = self._server.complete(case, self._tokens)
            except OSError:
                with self._lock:
                    self.errors += 1
                continue
            with self._lock:
                self.finished += 1
                self.different += text != self._expected[case]


def swap(pair: Drafts, is_better: bool, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One swap under load: exit status and words of the command, its seconds, and the streams."""
    folder.mkdir()
    current, candidate = (pair.worse, pair.better) if is_better else (pair.better, pair.worse)
    server = Server(pair, current, folder, arguments)
    try:
        cases = range(2 * len(PROMPTS))
        expected = {case: server.complete(case, arguments.tokens, is_plain=True) for case in cases}
        with Load(server, arguments.clients, arguments.tokens, expected) as load:
            time.sleep(arguments.warm_up)
            began = time.monotonic()
            status, words = server.swap(candidate, arguments)
            seconds = time.monotonic() - began
            time.sleep(2.0)
    finally:
        server.close()
    streams = {"finished": load.finished, "different": load.different, "errors": load.errors}
    return {"status": status, "seconds": round(seconds, 1), "words": words, **streams}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", default="smollm2-eagle", help="the better draft, inside the engine")
    parser.add_argument("--noise", type=float, default=0.5, help="noise of the worse draft, in standard deviations")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--period", type=float, default=4.0)
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds of load before the swap")
    parser.add_argument("--only", choices=["better", "worse"], help="one of both swaps")
    parser.add_argument("--depth", type=int, help="fixed depth without a circuit breaker; the rule `goodput` otherwise")
    parser.add_argument("--pool", action="store_true", help="swap in a draft pool instead of the engine")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.pool:
            models = write_models(Path(folder) / "models", LAYERS)
            pair = Drafts(models.target, models.good, models.poor)
        else:
            noisy = worsened(arguments.draft, Path(folder) / "noisy", arguments.noise)
            pair = Drafts("smollm2", arguments.draft, noisy)
        for name in ("better", "worse"):
            if arguments.only in (None, name):
                print(
                    json.dumps({"to": name, **swap(pair, name == "better", Path(folder) / name, arguments)}), flush=True
                )


if __name__ == "__main__":
    main()
