"""A server process: toggling speculation during 16 streams changes no text, and a trace covers all steps of a request."""

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.collector import Collector, collector
from tests.gateway.process import Process, server_process

STREAMS, SWITCHES, TOKENS = 16, 6, 48
KEY = {"authorization": "Bearer switch-me-please"}
SUBJECTS = ("a river", "a lamp", "the number seven", "an old map", "bread", "a compiler", "the moon", "a bicycle")


def body(number: int) -> dict[str, Any]:
    """Odd numbers sample. The prompts repeat, so that the n-gram proposer finds drafts."""
    subject = SUBJECTS[number % len(SUBJECTS)]
    prompt = f"{number}. I like {subject}. You like {subject}. We all like"
    return {
        "prompt": prompt,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "seed": number,
        "temperature": 0.8 if number % 2 else 0.0,
        "stream": True,
        "stream_options": {"include_origins": True},
    }


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Process, Collector]]:
    options = {"speculation.depth": "fixed", "speculation.max_depth": 3, "trace_ratio": 0.0}
    with (
        collector() as found,
        server_process(
            max_num_seqs=STREAMS,
            max_waiting=0,
            kv_tokens=STREAMS * 128,
            admin_key="switch-me-please",
            trace_endpoint=found.url,
            **options,
        ) as process,
    ):
        yield process, found


class Streams:
    """The text of all streams, as far as received."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._changed = asyncio.Event()
        self.texts = [""] * STREAMS
        self.origins: set[str] = set()
        self.chunks = 0
        self.running = STREAMS

    async def run(self, **options: Any) -> list[str]:
        await asyncio.gather(*(self._read(number, options) for number in range(STREAMS)))
        return self.texts

    async def wait_for(self, chunks: int) -> None:
        """Waits for more chunks, or for the end of all streams."""
        end = self.chunks + chunks
        while self.chunks < end and self.running:
            self._changed.clear()
            await self._changed.wait()

    async def _read(self, number: int, options: dict[str, Any]) -> None:
        async with self._client.stream("POST", "/v1/completions", json={**body(number), **options}) as reply:
            assert reply.status_code == 200
            ended = False
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                ended = line == "data: [DONE]"
                chunk = {} if ended else json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                for choice in chunk.get("choices", ()):
                    self.texts[number] += choice["text"]
                    self.origins |= {piece["origin"] for piece in choice.get("origins") or ()}
                self.chunks += 1
                self._changed.set()
            assert ended
        self.running -= 1
        self._changed.set()


def test_toggling_speculation_changes_no_text(server: tuple[Process, Collector]) -> None:
    async def run(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=64)) as client:
            plain = await Streams(client).run(speculation={"enabled": False})
            switches, origins = itertools.cycle([False, True]), set[str]()
            num_switches = 0
            while num_switches < 2 * SWITCHES:
                streams = Streams(client)
                reading = asyncio.create_task(streams.run())
                await streams.wait_for(STREAMS // 4)
                while streams.running and num_switches < 2 * SWITCHES:
                    on = next(switches)
                    changed = await client.patch("/admin/flags", json={"enabled": on}, headers=KEY)
                    assert changed.status_code == 200
                    assert changed.json()["flags"]["enabled"] is on
                    num_switches += 1
                    await streams.wait_for(STREAMS // 4)
                assert await reading == plain
                origins |= streams.origins
            assert {"plain", "accepted", "recovered"} <= origins
            assert len(set(plain)) > STREAMS // 2  # the prompts give different texts

    asyncio.run(run(server[0].url))


def test_a_trace_covers_http_and_every_verification(server: tuple[Process, Collector]) -> None:
    process, found = server
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    reply = httpx.post(f"{process.url}/v1/completions", json={**body(1), "stream": False}, headers=headers, timeout=60)
    metrics = reply.json()["metrics"]["speculative_decoding"]
    spans: list[Any] = []
    for _ in range(600):  # the gateway and the engine process send their spans in batches
        spans = [span for group in list(found.spans.values()) for span in group]
        if {"POST /v1/completions", "generate"} <= {span.name for span in spans}:
            break
        time.sleep(0.1)
    by_name: dict[str, list[Any]] = {}
    for span in spans:
        by_name.setdefault(span.name, []).append(span)
    (http,), (generate,) = by_name["POST /v1/completions"], by_name["generate"]
    assert {span.trace_id.hex() for span in spans} == {trace}  # the ratio is 0
    assert http.parent_span_id.hex() == parent
    assert generate.parent_span_id == http.span_id
    rounds = {span.span_id: span for span in by_name["round"]}
    assert {span.parent_span_id for span in rounds.values()} == {generate.span_id}
    assert {span.parent_span_id for span in by_name["verify"]} == set(rounds)
    drafted = [
        int(attribute.value.int_value)
        for span in rounds.values()
        for attribute in span.attributes
        if attribute.key == "paceline.depth"
    ]
    assert sum(drafted) == metrics["num_draft_tokens"]
    assert sum(depth > 0 for depth in drafted) == metrics["num_spec_steps"]
    assert b"I like" not in b"".join(found.bodies)
