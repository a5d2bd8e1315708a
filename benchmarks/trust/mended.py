"""Attacks on one server that a defect once let through: peak memory, seconds, and what a neighbour saw.

    PYTHONPATH=src:. python benchmarks/trust/mended.py             # all of them, each against a server of its own
    PYTHONPATH=src:. python benchmarks/trust/mended.py trailers    # one
    PYTHONPATH=OTHER/src:. python benchmarks/trust/mended.py       # the code of another checkout

Each attack meets a `paceline serve` with the embedded model on a free port of this machine and two API keys, of an attacker
and of a neighbour. The neighbour reads a seeded stream again and again, and another process calls `/health`. Prints a line of a
table for each attack. Memory is the growth of the gateway and of its helpers, without the engine.
"""

import argparse
import http.client
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil
from tests.gateway.process import server_process
from tests.poison.attack import health_watch

from paceline.gateway.auth import KeyFile

LIMITS = {"max_num_seqs": 16, "kv_tokens": 16384, "max_model_len": 1024}
MIB = 1 << 20
ADMIN_KEY = "an-admin-key-of-this-script"
LOCAL_SECONDS = 60.0
STREAM = {
    "prompt": "Once upon a time",
    "max_tokens": 64,
    "temperature": 0.8,
    "seed": 7,
    "ignore_eos": True,
    "stream": True,
}


class Server(NamedTuple):
    host: str
    port: int
    pid: int
    attacker: str
    """API key of the attacker."""
    neighbours: tuple[str, ...]
    """API keys of the others."""

    @property
    def neighbour(self) -> str:
        return self.neighbours[0]

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=60)

    def head(self, path: str, *headers: str, method: str = "POST", with_key: bool = True) -> bytes:
        """The first bytes of a request, up to its body."""
        key = (f"Authorization: Bearer {self.attacker}",) if with_key else ()
        lines = (f"{method} {path} HTTP/1.1", f"Host: {self.host}", "Content-Type: application/json", *key, *headers)
        return "\r\n".join((*lines, "", "")).encode()

    def post(self, path: str, body: bytes, timeout: float = 120.0, **headers: str) -> int:
        """The status; 0 if there was none."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                values = {"content-type": "application/json", "authorization": f"Bearer {self.attacker}"}
                values |= {name.replace("_", "-"): value for name, value in headers.items()}
                connection.request("POST", path, body, values)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()


@dataclass
class Seen:
    """What happened during an attack."""

    texts: list[str] = field(default_factory=list)
    """Texts of the neighbour's streams; empty for one that was lost."""
    gap: float = 0.0
    """Longest time between two events of the neighbour's stream, or until the first one, in seconds."""
    health: list[float] = field(default_factory=list)
    peak: float = 0.0
    """MB by which the gateway and its helpers grew at most."""


def trailers(server: Server) -> str:
    """Trailers without an end after the body of a request without a key, for three seconds."""
    return send_for(
        server,
        server.head("/health", "Transfer-Encoding: chunked", with_key=False) + b"0\r\n",
        b"X: " + b"y" * 60000 + b"\r\n",
    )


def trailer_value(server: Server) -> str:
    """One trailer whose value has no end."""
    return send_for(
        server, server.head("/health", "Transfer-Encoding: chunked", with_key=False) + b"0\r\nX: ", b"y" * 65536
    )


def extensions(server: Server) -> str:
    """Extensions of chunks without an end."""
    return send_for(server, server.head("/health", "Transfer-Encoding: chunked", with_key=False) + b"1;", b"x" * 65536)


def send_for(server: Server, head: bytes, part: bytes, seconds: float = 3.4) -> str:
    """Sends `part` again and again. Returns how much the server took and what it answered."""
    sent, answer, end = 0, b"", time.monotonic() + seconds
    with server.connect() as client:
        client.sendall(head)
        with suppress(OSError):
            while time.monotonic() < end:
                client.sendall(part)
                sent += len(part)
                client.setblocking(False)
                with suppress(BlockingIOError):
                    answer = client.recv(100)
                client.settimeout(60)
                if answer:
                    break
    return f"{sent / MIB:.1f} MiB taken, answer {answer[9:12].decode() or 'none'}"


def long_prompts(server: Server) -> str:
    send_long_prompts(server)
    return f"busy for {busy_seconds(server.pid):.1f} s after the last client has gone"


def send_long_prompts(server: Server) -> str:
    """100 bodies of 66 prompts of 60,000 letters, whose clients leave after three seconds."""
    body = json.dumps({"prompt": ["a" * 60_000] * 66, "max_tokens": 1}).encode()
    head = server.head("/v1/completions", f"Content-Length: {len(body)}")

    def send() -> None:
        with suppress(OSError), server.connect() as client:
            end = time.monotonic() + 3.0
            client.settimeout(3.0)
            client.sendall(head + body)
            client.settimeout(max(0.01, end - time.monotonic()))
            client.recv(1000)

    together([send] * 100)
    return ""


def large_bodies(server: Server) -> str:
    """100 large bodies of one key, and meanwhile bodies of 70 kB of another key."""
    prompts = json.dumps({"prompt": [[1] * 500] * 100, "max_tokens": 1, "metadata": {"a": "x" * 3_800_000}}).encode()
    small = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 70_000}).encode()
    waits: list[float] = []

    def other() -> None:
        for _ in range(5):
            began = time.monotonic()
            server.post("/v1/completions", small, authorization=f"Bearer {server.neighbour}")
            waits.append(time.monotonic() - began)

    together([*[lambda: server.post("/v1/completions", prompts)] * 100, other])
    return f"bodies of 70 kB of the neighbour took {max(waits):.1f} s at most"


def unfinished_bodies(server: Server) -> str:
    """150 bodies of 4 MiB without their last byte, for ten seconds."""
    head, body = server.head("/v1/completions", f"Content-Length: {4 * MIB}"), b" " * (4 * MIB - 1)

    def send() -> None:
        with suppress(OSError), server.connect() as client:
            client.settimeout(10.0)
            client.sendall(head + body)
            client.recv(1000)

    together([send] * 150)
    return ""


def other_encodings(server: Server) -> str:
    """Bodies in UTF-16 that hide 600,000 values behind an escaped quote, and one with the bytes of a surrogate."""
    body = ('{"prompt": "\\"", "unknown": [' + "1," * 600_000 + "1]}").encode("utf-16")
    statuses = Counter(server.post("/v1/completions", body) for _ in range(8))
    surrogate = server.post("/v1/completions", b'{"prompt": "\xed\xa0\x80", "max_tokens": 1}')
    return f"statuses {dict(statuses)}, of a surrogate {surrogate}"


def forwarded(server: Server) -> str:
    """100 wrong keys, each with another address in X-Forwarded-For."""
    statuses = Counter(
        server.post("/v1/completions", b"{}", authorization="Bearer wrong", x_forwarded_for=f"6.6.6.{number}")
        for number in range(100)
    )
    return f"statuses {dict(statuses)}"


def idle_connections(server: Server) -> str:
    """1,500 idle connections of one address; then a request of the same address."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    connections = list[socket.socket]()
    with suppress(OSError):
        connections.extend(server.connect() for _ in range(1500))
    time.sleep(1.0)
    with suppress(psutil.Error):
        limit = psutil.Process(server.pid).rlimit(psutil.RLIMIT_NOFILE)[0]
    began, status = time.monotonic(), 0
    while status != 200 and time.monotonic() < began + 90:
        status = server.post("/v1/completions", b'{"prompt": "a", "max_tokens": 1}', timeout=10)
        time.sleep(0.2)
    waited = time.monotonic() - began
    for connection in connections:
        connection.close()
    return f"a request of the same address is answered with {status} after {waited:.1f} s; {limit} files may be open"


def child_secrets(server: Server) -> str:
    """The environments of the children."""
    found, children = 0, psutil.Process(server.pid).children(recursive=True)
    for child in children:
        with suppress(psutil.Error):
            found += ADMIN_KEY in child.environ().values()
    return f"{found} of {len(children)} children have the admin key in their environment"


def together(tasks: Sequence[Callable[[], Any]]) -> None:
    """Runs each task on a thread of its own."""
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def busy_seconds(pid: int, most: float = 120.0) -> float:
    """Seconds until the gateway takes less than a fifth of a processor for one second."""
    process, began = psutil.Process(pid), time.monotonic()
    while time.monotonic() < began + most:
        before = sum(process.cpu_times()[:2])
        time.sleep(1.0)
        if sum(process.cpu_times()[:2]) - before < 0.2:
            break
    return time.monotonic() - began - 1.0


ATTACKS: dict[str, Callable[[Server], str]] = {
    "trailers": trailers,
    "trailer value": trailer_value,
    "chunk extensions": extensions,
    "long prompts": long_prompts,
    "large bodies": large_bodies,
    "unfinished bodies": unfinished_bodies,
    "other encodings": other_encodings,
    "forwarded addresses": forwarded,
    "idle connections": idle_connections,
    "child secrets": child_secrets,
}


TEMPLATE = """
from paceline.model_files.tokenizer import ChatTemplate
ChatTemplate("{{ ('a\\n' * 200000) | indent(20000) | length }}", {}).render([])
"""
FOLDER = """
import json, tempfile
from pathlib import Path
folder = Path(tempfile.mkdtemp(prefix="mended-"))
level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}
"""
OPEN = """
(folder / "tokenizer.json").write_text(json.dumps(tokenizer))
begin()
from paceline.model_files.tokenizer import tokenizer_from_folder
tokenizer_from_folder(folder).encode("a" * 30)
"""
HEADER = """
config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128}
config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
config |= {"vocab_size": 1000, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu"}
(folder / "config.json").write_text(json.dumps(config))
with (folder / "model.safetensors").open("wb") as file:
    parts = ", ".join('"t%d": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}' % i for i in range(1_000_000))
    file.write((len(parts) + 2).to_bytes(8, "little") + b"{" + parts.encode() + b"}")
begin()
from paceline.models.weights.safetensors import open_folder
open_folder(folder)
"""
VOCABULARY = 'model["vocab"] = {"t%d" % i: i for i in range(3_000_000)}'
NORMALIZER = """
double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [double] * 40}
"""
YAML = """
lists = ["&a0 [x, x]"] + [f"&a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 27)]
(folder / "config.yaml").write_text("model: [" + ", ".join(lists) + "]")
begin()
from paceline.deploy.load import load_config
load_config(folder / "config.yaml", {}, {})
"""
MESSAGE = """
import socket
from urllib.parse import urlsplit
from paceline.wire.draft_messages import TO_DRAFT_WORKER
from paceline.wire.transport import Listener
listener = Listener("tcp://127.0.0.1:0", TO_DRAFT_WORKER)
parts, sent = urlsplit(listener.address), 0
ready = b"\\x05READY" + b"\\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
frame = b"\\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)
begin()
with socket.create_connection((parts.hostname, parts.port)) as client:
    client.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00" + b"NULL".ljust(20, b"\\0") + bytes(32))
    client.sendall(b"\\x04" + bytes([len(ready)]) + ready)
    try:
        while sent < 1600:
            client.sendall(frame)
            sent += 1
        end = "not cut"
    except OSError:
        end = "cut"
raise RuntimeError(f"{sent} MiB of one message, {end}")
"""
LOCAL = {
    "endless message": MESSAGE,
    "template": TEMPLATE,
    "header of tensors": FOLDER + HEADER,
    "vocabulary": FOLDER + VOCABULARY + OPEN,
    "normalizer": FOLDER + NORMALIZER + OPEN,
    "YAML aliases": FOLDER + YAML,
}
"""Code that reads a file of a model. It runs in a process of its own, without a server."""


def run_local(name: str) -> str:
    """A row of the table, of code without a server."""
    code = (
        "import re, time, torch\nfrom pathlib import Path\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "def begin():\n global began, before\n"
        " Path('/proc/self/clear_refs').write_text('5')\n began, before = time.monotonic(), peak()\n"
        "begin()\n"
        f"try:\n exec({LOCAL[name]!r}, globals())\n text = 'no error'\n"
        "except BaseException as error:\n text = f'{type(error).__name__}: {error!s:.120}'\n"
        "print(f'| {(peak() - before) / 1024:.0f} | {time.monotonic() - began:.1f} | | | | {text} |', flush=True)"
    )
    try:
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LOCAL_SECONDS)
    except subprocess.TimeoutExpired:
        return f"| {name} | | {LOCAL_SECONDS:.0f} | | | | it did not end |"
    return f"| {name} {result.stdout.strip() or f'| | | | | | the process ended with status {result.returncode} |'}"


@contextmanager
def server_with_keys(num_neighbours: int = 1, **config: Any) -> Iterator[Server]:
    """A server with the keys of the attacker and the neighbours."""
    with tempfile.TemporaryDirectory(prefix="mended-") as folder:
        path = Path(folder) / "keys.json"
        names = ("attacker", *(f"neighbour-{number}" for number in range(num_neighbours)))
        attacker, *neighbours = (KeyFile(str(path)).add(name) for name in names)
        settings = {**LIMITS, "max_waiting": 64, "api_keys": str(path), "log_level": "error", **config}
        with server_process(**settings) as process:
            parts = urlsplit(process.url)
            yield Server(parts.hostname or "", parts.port or 0, process.popen.pid, attacker, tuple(neighbours))


@contextmanager
def watched(server: Server, seen: Seen) -> Iterator[None]:
    """Inside the block the neighbour reads streams, `/health` is called, and memory is measured."""
    stop, before = threading.Event(), memory(server.pid)

    def read() -> None:
        while not stop.is_set():
            read_stream(server, seen)

    def measure() -> None:
        while not stop.wait(0.02):
            seen.peak = max(seen.peak, memory(server.pid) - before)

    threads = [threading.Thread(target=task) for task in (read, measure)]
    with health_watch(f"http://{server.host}:{server.port}", seen.health):
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def read_stream(server: Server, seen: Seen) -> None:
    connection, text = http.client.HTTPConnection(server.host, server.port, timeout=120), ""
    last = time.monotonic()
    try:
        headers = {"content-type": "application/json", "authorization": f"Bearer {server.neighbour}"}
        connection.request("POST", "/v1/completions", json.dumps(STREAM), headers)
        for line in connection.getresponse():
            if not line.startswith(b"data: "):
                continue
            seen.gap, last = max(seen.gap, time.monotonic() - last), time.monotonic()
            if line.strip() == b"data: [DONE]":
                seen.texts.append(text)
                return
            text += "".join(choice["text"] for choice in json.loads(line[6:]).get("choices", ()))
    except (OSError, http.client.HTTPException, ValueError):
        pass
    finally:
        connection.close()
    seen.texts.append("")


def memory(pid: int) -> float:
    """Resident MB of the gateway and its helpers, without the engine."""
    total = 0
    with suppress(psutil.Error):
        gateway = psutil.Process(pid)
        for process in (gateway, *gateway.children(recursive=True)):
            with suppress(psutil.Error):
                if "paceline.worker" not in " ".join(process.cmdline()):
                    total += process.memory_info().rss
    return total / 1e6


def run(name: str) -> str:
    """A row of the table."""
    with server_with_keys() as server:
        plain = Seen()
        for _ in range(2):
            read_stream(server, plain)
        seen, began = Seen(), time.monotonic()
        with watched(server, seen):
            outcome = ATTACKS[name](server)
            seconds = time.monotonic() - began
        different = sum(text != plain.texts[0] for text in seen.texts)
    values: Sequence[Any] = (
        name,
        f"{seen.peak:.0f}",
        f"{seconds:.1f}",
        f"{len(seen.texts)}, {seen.texts.count('')}, {different}",
        f"{seen.gap:.2f}",
        f"{max(seen.health) * 1e3:.0f}",
        outcome,
    )
    return "| " + " | ".join(map(str, values)) + " |"


def main() -> None:
    os.environ["PACELINE_ADMIN_KEY"] = ADMIN_KEY
    with suppress(ValueError, OSError):  # as most systems start a server
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attacks", nargs="*", help=f"of {', '.join([*ATTACKS, *LOCAL])}; default: all")
    names = parser.parse_args().attacks or [*ATTACKS, *LOCAL]
    print(
        "| attack | memory, MB | seconds | streams, lost, different | longest gap, s | `/health` slowest, ms | outcome |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in names:
        print(run_local(name) if name in LOCAL else run(name), flush=True)


if __name__ == "__main__":
    main()
