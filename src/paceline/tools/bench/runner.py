"""Runs the same conversations through all contenders in turns, so that load of the machine affects all of them.

A contender is a system that answers a conversation and reports when each token arrived. `ServerContender` is any
OpenAI-compatible server: streamed over HTTP, timed at the client. A chunk has no token count. The server's `usage` gives the
total, which is distributed over the chunks by the length of their text. Percentiles per token are exact if every chunk is one
token, and close otherwise.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from paceline.core.clock import Clock
from paceline.core.errors import MissingDependency, PacelineError
from paceline.core.request import SamplingParams
from paceline.tools.bench.report import Measured, measure
from paceline.tools.prompts import AnswerTimes, Arrival, BenchPrompt

if TYPE_CHECKING:
    import httpx

    from paceline.engine.start import LLM
    from paceline.tools.profile import Recorder


Message = Mapping[str, str]


class MeasuredSystem(Protocol):
    """A system to measure."""

    name: str

    async def answer(self, messages: Sequence[Message], sampling: SamplingParams, category: str) -> AnswerTimes: ...


class EngineContender:
    """An engine in this process, with speculation on or off."""

    def __init__(self, name: str, llm: "LLM", speculative: bool, clock: Clock) -> None:
        self.name = name
        self._llm = llm
        self._speculative = speculative
        self._clock = clock

    async def answer(self, messages: Sequence[Message], sampling: SamplingParams, category: str) -> AnswerTimes:
        arrivals: list[Arrival] = []
        ids: list[int] = []
        text = ""
        started = self._clock.now()
        # A salt per contender: contenders do not share the prefix cache.
        stream = self._llm.astream(
            messages,
            sampling,
            speculation={"enabled": self._speculative},
            category=category,
            cache_salt=f"bench/{self.name}",
        )
        async for output in stream:
            arrivals.append(Arrival.of(output, self._clock.now()))
            ids += output.tokens
            text += output.text
        return AnswerTimes(category, started, tuple(arrivals), text, tuple(ids))


class ProfiledContender:
    """Labels the recorded rounds with the contender's name. Contenders run in sequence, and the warm-up is not recorded."""

    def __init__(self, contender: MeasuredSystem, recorder: "Recorder") -> None:
        self.name = contender.name
        self._contender = contender
        self._recorder = recorder

    async def answer(self, messages: Sequence[Message], sampling: SamplingParams, category: str) -> AnswerTimes:
        self._recorder.label = None if category == "warm-up" else self.name
        return await self._contender.answer(messages, sampling, category)


WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations to run."""

    prompts: Sequence[BenchPrompt]
    sampling: SamplingParams
    """Sampling parameters. Prompt i has `seed + i` for every contender."""
    concurrency: int = 1
    system: str | None = None

    @property
    def waves(self) -> list[range]:
        """Indices of prompts that run concurrently."""
        count = len(self.prompts)
        return [range(i, min(i + self.concurrency, count)) for i in range(0, count, self.concurrency)]


async def compare(
    contenders: Sequence[MeasuredSystem], workload: Workload, clock: Clock, on_wave: Callable[[int], None]
) -> tuple[Measured, ...]:
    """Measure every contender. The first is the reference for text. `on_wave(n)` reports that n more conversations are done.

    The first contender changes with every wave. A wave ends with its last answer.
    """
    traces: list[list[AnswerTimes]] = [[] for _ in contenders]
    seconds = [0.0] * len(contenders)
    for contender in contenders:
        await _warm_up(contender, workload)
    for number, wave in enumerate(workload.waves):
        for turn in range(len(contenders)):
            i = (turn + number) % len(contenders)
            started = clock.now()
            traces[i] += await _run_wave(contenders[i], workload, wave)
            seconds[i] += clock.now() - started
            on_wave(len(wave))
    return tuple(
        measure(contender.name, some, spent, traces[0])
        for contender, some, spent in zip(contenders, traces, seconds, strict=True)
    )


async def _warm_up(contender: MeasuredSystem, workload: Workload) -> None:
    sampling = replace(workload.sampling, max_tokens=min(WARM_UP_TOKENS, workload.sampling.max_tokens), seed=0)
    await contender.answer([{"role": "user", "content": "Count from one to ten."}], sampling, "warm-up")


async def _run_wave(contender: MeasuredSystem, workload: Workload, wave: range) -> list[AnswerTimes]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_converse(contender, workload, i)) for i in wave]
    except ExceptionGroup as failures:  # one error is enough
        raise failures.exceptions[0] from None
    return [trace for task in tasks for trace in task.result()]


async def _converse(contender: MeasuredSystem, workload: Workload, index: int) -> list[AnswerTimes]:
    prompt, sampling = workload.prompts[index], workload.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=sampling.seed + index)
    messages: list[Message] = [{"role": "system", "content": workload.system}] if workload.system else []
    traces: list[AnswerTimes] = []
    for turn in prompt.turns:
        messages.append({"role": "user", "content": turn})
        trace = await contender.answer(messages, sampling, prompt.category)
        messages.append({"role": "assistant", "content": trace.text})
        traces.append(trace)
    return traces


TIMEOUT = 600.0


class ServerFailed(PacelineError):
    """The other server cannot be reached, or its API is not OpenAI's."""


class ServerContender:
    """A server and the model it serves. It is created by `connect`."""

    def __init__(self, client: "httpx.AsyncClient", model: str, clock: Clock) -> None:
        self.name = f"server {model}"
        self._client = client
        self._model = model
        self._clock = clock

    async def answer(self, messages: Sequence[Message], sampling: SamplingParams, category: str) -> AnswerTimes:
        import httpx

        pieces: list[tuple[float, str]] = []
        usage: Mapping[str, Any] = {}
        metrics: Mapping[str, Any] = {}
        started = self._clock.now()
        try:
            async with self._client.stream("POST", "chat/completions", json=self._body(messages, sampling)) as response:
                await _check(response)
                async for chunk in _chunks(response):
                    now = self._clock.now()
                    delta = chunk["choices"][0].get("delta", {}).get("content") if chunk.get("choices") else None
                    if delta:
                        pieces.append((now, delta))
                    usage = chunk.get("usage") or usage
                    metrics = (chunk.get("metrics") or {}).get("speculative_decoding") or metrics
        except httpx.HTTPError as error:
            raise ServerFailed(f"the connection to {self._client.base_url} failed: {error!r}") from error
        tokens = usage.get("completion_tokens", len(pieces))
        arrivals = _spread(pieces, tokens)
        return AnswerTimes(
            category, started, arrivals, "".join(text for _, text in pieces), rounds=_rounds(arrivals, metrics)
        )

    def _body(self, messages: Sequence[Message], sampling: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if sampling.top_k:  # not in OpenAI's API, but most servers have it
            body["top_k"] = sampling.top_k
        if sampling.json_schema is not None:
            schema = {"name": "answer", "schema": dict(sampling.json_schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body


@asynccontextmanager
async def connect(url: str, api_key: str | None, clock: Clock) -> AsyncIterator[ServerContender]:
    """`url` with or without the final /v1."""
    try:
        import httpx
    except ImportError:
        raise MissingDependency("httpx", "measuring a server", "bench") from None
    base = url.rstrip("/")
    base = base if base.endswith("/v1") else base + "/v1"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx.AsyncClient(base_url=base + "/", headers=headers, timeout=TIMEOUT) as client:
        try:
            response = await client.get("models")
            await _check(response)
            models = [entry["id"] for entry in response.json()["data"]]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerFailed(f"no server at {base}: {error}; start one, or check the address") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ServerFailed(f"{base}/models is not OpenAI's API: {error!r}") from error
        if not models:
            raise ServerFailed(f"{base} serves no model")
        yield ServerContender(client, models[0], clock)


async def _check(response: "httpx.Response") -> None:
    if response.is_error:
        body = (await response.aread()).decode("utf-8", "replace")
        raise ServerFailed(f"{response.url} answered {response.status_code}: {body[:500]}")


async def _chunks(response: "httpx.Response") -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event up to `[DONE]`."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except json.JSONDecodeError:
            raise ServerFailed(f"{response.url} sent an event that is not JSON: {data[:200]}") from None
        if "error" in chunk:
            raise ServerFailed(f"{response.url} failed: {chunk['error']}")
        yield chunk


def _spread(pieces: Sequence[tuple[float, str]], tokens: int) -> tuple[Arrival, ...]:
    """Distribute `tokens` over the pieces by the length of their text, in whole tokens."""
    if len(pieces) == tokens:
        return tuple(Arrival(at, 1) for at, _ in pieces)
    characters = sum(len(text) for _, text in pieces)
    arrivals, seen, assigned = [], 0, 0
    for at, text in pieces:
        seen += len(text)
        share = round(tokens * seen / characters) - assigned
        assigned += share
        arrivals.append(Arrival(at, share))
    return tuple(arrivals)


def _rounds(arrivals: Sequence[Arrival], metrics: Mapping[str, Any]) -> int:
    """Passes after the first token: every accepted draft saved one. 0 if the server does not report it."""
    if "num_accepted_draft_tokens" not in metrics:
        return 0
    return max(0, sum(arrival.tokens for arrival in arrivals) - 1 - int(metrics["num_accepted_draft_tokens"]))
