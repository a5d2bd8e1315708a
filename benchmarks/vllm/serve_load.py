"""Load any OpenAI server with streaming chat requests, and print throughput, TTFT and time per output token (TPOT).

    python benchmarks/vllm/serve_load.py --port 8000 --model NAME --prompts PROMPTS.jsonl --streams 64 --requests 512
    python benchmarks/vllm/serve_load.py --port 8000 --model NAME --prompts PROMPTS.jsonl --rate 40 --requests 800 \
        --arrivals azure_llm_trace_code.csv

The first form is a closed loop: every stream sends its next request when a text ends. The second is an open loop: requests
arrive at the times of a trace, scaled to `--rate` requests per second, whether earlier ones have ended or not. It also prints
how many requests per second met the objective. `--off` asks Paceline not to speculate. Needs aiohttp (pip install aiohttp).
"""

import argparse
import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from paceline.planning.simulator.result import quantile
from paceline.planning.traces.trace_files import load_trace


def arrival_times(path: Path, count: int, rate: float) -> list[float]:
    """The first `count` arrivals of a trace, scaled to a mean of `rate` per second."""
    seconds = [request.arrival for request in load_trace(path).requests[:count]]
    scale = (len(seconds) - 1) / rate / (seconds[-1] - seconds[0])
    return [scale * (second - seconds[0]) for second in seconds]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered request."""

    ttft: float
    tpot: float
    tokens: int
    sent: float
    ended: float


class Client:
    def __init__(self, session: aiohttp.ClientSession, texts: list[str], options: argparse.Namespace) -> None:
        self._session, self._texts, self._options = session, texts, options
        self.answers: list[Answer] = []
        self.num_refused = 0

    async def send(self, number: int) -> None:
        """One request, to its last token."""
        sent = time.perf_counter()
        first, last, tokens = None, sent, 0
        url = f"http://{self._options.host}:{self._options.port}/v1/chat/completions"
        async with self._session.post(url, json=self._body(number)) as reply:
            if reply.status != 200:
                self.num_refused += 1
                return
            async for line in reply.content:
                if not line.startswith(b"data: ") or b"[DONE]" in line:
                    continue
                event = json.loads(line[6:])
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
                if event.get("choices") and event["choices"][0]["delta"].get("content"):
                    last = time.perf_counter()
                    first = first or last
        if first is not None:
            tpot = (last - first) / max(1, tokens - 1)
            self.answers.append(Answer(first - sent, tpot, tokens, sent, last))

    def _body(self, number: int) -> dict[str, Any]:
        options = self._options
        body: dict[str, Any] = {
            "model": options.model,
            "messages": [{"role": "user", "content": self._texts[number % len(self._texts)]}],
            "max_tokens": options.tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.off:
            body["speculation"] = {"enabled": False}
        return body

    async def closed_loop(self, streams: int, requests: int) -> None:
        numbers = iter(range(requests))

        async def stream() -> None:
            for number in numbers:
                await self.send(number)

        await asyncio.gather(*(stream() for _ in range(streams)))

    async def open_loop(self, times: list[float]) -> None:
        began, tasks = time.perf_counter(), []
        for number, at in enumerate(times):
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            tasks.append(asyncio.create_task(self.send(number)))
        await asyncio.gather(*tasks)


@dataclass(frozen=True, slots=True)
class Load:
    """What one run measured; times in milliseconds."""

    name: str
    throughput: float
    """Tokens per second."""
    ttft: tuple[float, float]
    """p50 and p99."""
    tpot: tuple[float, float]
    answered: int
    refused: int
    good: int
    """Answers within the objective."""
    seconds: float

    @property
    def good_rate(self) -> float:
        return self.good / self.seconds

    def __str__(self) -> str:
        line = (
            f"{self.name}: {self.throughput:.0f} tok/s; TTFT p50 {self.ttft[0]:.0f} p99 {self.ttft[1]:.0f} ms; "
            f"TPOT p50 {self.tpot[0]:.2f} p99 {self.tpot[1]:.2f} ms; {self.answered} answered, {self.refused} refused"
        )
        return f"{line}; {self.good_rate:.1f} requests/s ({self.good / self.answered:.1%}) within the objective"


def quantiles(values: list[float]) -> tuple[float, float]:
    """p50 and p99, in milliseconds."""
    ordered = sorted(values)
    return 1e3 * quantile(ordered, 0.5), 1e3 * quantile(ordered, 0.99)


async def run(options: argparse.Namespace) -> Load:
    texts = [json.loads(line)["turns"][0][:4000] for line in options.prompts.read_text().splitlines()]
    timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await Client(session, texts, options).send(3)  # connects
        client = Client(session, texts, options)
        if options.rate:
            await client.open_loop(arrival_times(options.arrivals, options.requests, options.rate))
            name = f"{options.rate:g} requests/s"
        else:
            await client.closed_loop(options.streams, options.requests)
            name = f"{options.streams} streams"
    answers = client.answers
    if not answers:
        raise SystemExit(f"{name}: no request was answered, {client.num_refused} were refused")
    seconds = max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
    return Load(
        name=name,
        throughput=sum(answer.tokens for answer in answers) / seconds,
        ttft=quantiles([answer.ttft for answer in answers]),
        tpot=quantiles([answer.tpot for answer in answers]),
        answered=len(answers),
        refused=client.num_refused,
        good=sum(1e3 * answer.ttft <= options.max_ttft and 1e3 * answer.tpot <= options.max_tpot for answer in answers),
        seconds=seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a list `turns`")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rate", type=float, help="requests per second; an open loop")
    parser.add_argument("--arrivals", type=Path, help="trace: .csv of Azure, or .jsonl of Mooncake")
    parser.add_argument("--max-ttft", type=float, default=500.0, help="objective, in ms")
    parser.add_argument("--max-tpot", type=float, default=25.0, help="objective, in ms")
    parser.add_argument("--off", action="store_true", help="ask Paceline not to speculate")
    options = parser.parse_args()
    if options.rate and not options.arrivals:
        parser.error("--rate needs --arrivals")
    print(asyncio.run(run(options)), flush=True)


if __name__ == "__main__":
    main()
