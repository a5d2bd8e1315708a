"""A real server, watched and switched: speculation goes off and on while 32 streams run, and none fails or says anything else
than plain; a caller's trace goes on from HTTP down to every verification."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.collector import Collector, collector
from tests.server.process import Process, server_process

STREAMS, SWITCHES, TOKENS = 32, 10, 44
KEY = {"authorization": "Bearer switch-me-please"}
SUBJECTS = ("a river", "a lamp", "the number seven", "an old map", "bread", "a compiler", "the moon", "a bicycle")


def body(number: int) -> dict[str, Any]:
    """Every other one is sampled. The prompts repeat themselves, so that there is something to look up."""
    subject = SUBJECTS[number % len(SUBJECTS)]
    said = f"{number}. I like {subject}. You like {subject}. We all like"
    return {
        "prompt": said,
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
    """What came so far, of all of them."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._news = asyncio.Event()
        self.texts = [""] * STREAMS
        self.origins: set[str] = set()
        self.chunks = 0
        self.running = STREAMS

    async def run(self, **options: Any) -> list[str]:
        await asyncio.gather(*(self._read(number, options) for number in range(STREAMS)))
        return self.texts

    async def more(self, chunks: int) -> None:
        """Until so many more have come, or all is over."""
        end = self.chunks + chunks
        while self.chunks < end and self.running:
            self._news.clear()
            await self._news.wait()

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
                self._news.set()
            assert ended
        self.running -= 1
        self._news.set()


def test_32_streams_do_not_notice_that_speculation_is_switched_ten_times(server: tuple[Process, Collector]) -> None:
    async def run(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=64)) as client:
            plain = await Streams(client).run(speculation={"enabled": False})
            streams = Streams(client)
            reading = asyncio.create_task(streams.run())
            running = []
            for number in range(2 * SWITCHES):
                await streams.more(STREAMS // 4)
                running.append(streams.running)
                on = bool(number % 2)
                changed = await client.patch("/admin/flags", json={"enabled": on}, headers=KEY)
                assert changed.status_code == 200
                assert changed.json()["flags"]["enabled"] is on
            assert running == [STREAMS] * (2 * SWITCHES)
            switched = await reading
            assert switched == plain
            assert {"plain", "accepted", "recovered"} <= streams.origins
            assert len(set(plain)) > STREAMS // 2  # they are not all alike, or the comparison would say little

    asyncio.run(run(server[0].url))


def test_a_trace_from_http_to_every_verification(server: tuple[Process, Collector]) -> None:
    process, found = server
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    reply = httpx.post(f"{process.url}/v1/completions", json={**body(1), "stream": False}, headers=headers, timeout=60)
    metrics = reply.json()["metrics"]["speculative_decoding"]
    spans: list[Any] = []
    for _ in range(600):  # they are sent in batches, one a second at the least
        spans = [span for group in list(found.spans.values()) for span in group]
        if any(span.name.startswith("POST") for span in spans):
            break
        time.sleep(0.1)
    by_name: dict[str, list[Any]] = {}
    for span in spans:
        by_name.setdefault(span.name, []).append(span)
    (http,), (generate,) = by_name["POST /v1/completions"], by_name["generate"]
    assert {span.trace_id.hex() for span in spans} == {trace}  # nobody else was traced: the ratio is 0
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
