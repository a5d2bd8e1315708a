"""Bodies of all routes, and resumed streams, through the whole application with a target that generates a fixed text.

An input of `bodies` is the path of a route, a newline, and the body. One of `resume` is a byte of options, a byte that chooses
an event, a Last-Event-ID (empty for that of the event), a zero byte, and the text that the target generates.
"""

import asyncio
import json
from random import Random
from typing import Any

from paceline.core.config import EngineConfig
from tests.fuzz.mutations import mutate_bytes, mutate_json
from tests.fuzz.target import FuzzTarget
from tests.gateway.fakes import served

ADMIN = "open-sesame"
LONGEST = 400
"""Characters of the text that the target generates: a stream has as many tokens."""
generated = 'Hello there! <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
server = served(
    lambda request: generated,
    admin_key=ADMIN,
    max_waiting=4096,
    engine=EngineConfig(model="fake", max_num_seqs=64, max_model_len=2048),
)
loop = asyncio.new_event_loop()


def post(path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    """Status and body of the response."""
    pairs = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body)), **headers}
    if path.startswith("/admin"):
        pairs["authorization"] = f"Bearer {ADMIN}"
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in pairs.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    status, received = 0, bytearray()

    async def run() -> None:
        messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]
        is_over = asyncio.Event()

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await is_over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            received.extend(message.get("body", b""))

        await server.app(scope, receive, send)
        is_over.set()

    loop.run_until_complete(run())
    return status, bytes(received)


def fuzz_body(data: bytes) -> bool:
    line, _, body = data.partition(b"\n")
    path = line.decode("ascii", "replace")
    if not path.startswith("/") or path.startswith("/admin/pools"):
        return False
    server.target.requests.clear()
    status, received = post(path, body)
    assert 200 <= status < 500, f"{path}: {status} {received!r:.500}"
    if status >= 400:
        assert json.loads(received)["error"]["message"]
    return status < 400


def fuzz_resumption(data: bytes) -> bool:
    global generated
    options, event = (data[0], data[1]) if len(data) > 1 else (0, 0)
    last, _, text = data[2:].partition(b"\0")
    before, generated = generated, text.decode("utf-8", "replace")[:LONGEST]
    try:
        return _resume(options, event, last.decode("latin-1"))
    finally:
        generated = before


def _resume(options: int, event: int, last: str) -> bool:
    is_chat, count = bool(options & 1), 1 + (options >> 1 & 1)
    body: dict[str, Any] = {
        "stream": True,
        "n": count,
        "max_tokens": 450,
        "stream_options": {"resumable": True, "include_usage": bool(options & 4), "include_origins": bool(options & 8)},
    }
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    body |= {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
    if options & 16:
        body["stop"] = ["the", "\n\n"]
    if is_chat and options & 32:
        tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
        body["tools"] = [{"type": "function", "function": tool}]
    encoded = json.dumps(body).encode()
    server.target.requests.clear()
    status, received = post(path, encoded)
    assert status == 200, f"{status} {received!r:.500}"
    ids, chunks = _events(received)
    whole = _joined(chunks)
    at = event % len(ids)
    status, received = post(path, encoded, last_event_id=last or ids[at])
    if last:
        assert status in (200, 400, 404), f"{status} {received!r:.500}"
        return status == 200
    assert status == 200, f"{status} {received!r:.500}"
    rest = _events(received)[1]
    assert _joined(chunks[: at + 1] + rest) == whole, f"{ids[at]}: {rest}"
    return True


def _events(received: bytes) -> tuple[list[str], list[Any]]:
    """Ids and data of the events."""
    *events, done = received.decode().removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]", done
    pairs = [event.split("\n") for event in events]
    return [name.removeprefix("id: ") for _, name in pairs], [json.loads(line[6:]) for line, _ in pairs]


def _joined(chunks: list[Any]) -> Any:
    """Text, reasoning, calls and the reason of the end of each choice."""
    choices: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            parts = choices.setdefault(choice["index"], ["", "", {}, None])
            delta = choice.get("delta", choice)
            parts[0] += delta.get("text") or delta.get("content") or ""
            parts[1] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", ()):
                known = parts[2].setdefault(call["index"], ["", ""])
                known[0] += call["function"].get("name", "")
                known[1] += call["function"]["arguments"]
            parts[3] = choice["finish_reason"] or parts[3]
    return choices


def mutate_body(data: bytes, rng: Random) -> bytes:
    line, _, body = data.partition(b"\n")
    return line + b"\n" + mutate_json(body, rng)


TARGETS = {
    "bodies": FuzzTarget(fuzz_body, mutate_body, 8192),
    "resume": FuzzTarget(fuzz_resumption, mutate_bytes, 512),
}
