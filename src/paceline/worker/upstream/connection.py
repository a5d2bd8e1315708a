"""The HTTP side of an upstream worker: streams of completions, and the server's health, on a thread of their own.

`step_output` makes step outputs of the server-sent events of a completion. `parse_load` and `parse_cache_tokens` read the load
and the size of the KV cache from the metrics of the server.
"""

import asyncio
import json
import logging
import re
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import GenerationFailed, InvalidRequest, MissingDependency, PacelineError
from paceline.core.output import OutputEvent, StepOutput, TokenLogprobs
from paceline.core.request import Request
from paceline.core.sequence import FinishReason, Origin
from paceline.worker.upstream.bodies import completion_body

logger = logging.getLogger(__name__)

TOKEN_ID = "token_id:"
FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class UpstreamFailed(PacelineError):
    """The server of another engine failed on a request; another worker may serve it."""


def parse_event(line: str) -> Mapping[str, Any] | None:
    """The JSON of an event. None for lines that are no event and for the end of the stream."""
    if not line.startswith("data:"):
        return None
    data = line[5:].strip()
    if data == "[DONE]":
        return None
    try:
        chunk = json.loads(data)
    except json.JSONDecodeError:
        raise UpstreamFailed(f"the server sent an event that is not JSON: {data[:200]}") from None
    if not isinstance(chunk, dict) or "error" in chunk:
        raise UpstreamFailed(f"the server failed: {str(chunk)[:300]}")
    return chunk


def step_output(chunk: Mapping[str, Any], request_id: str, choice: int, wants_logprobs: bool) -> StepOutput | None:
    """What the chunk adds to a choice. None if it adds nothing. Raises `UpstreamFailed` if it has no token ids."""
    choices = chunk.get("choices") or ()
    if not choices:
        return None
    value = choices[0]
    reason = value.get("finish_reason")
    if reason is not None and reason not in FINISH_REASONS:
        raise UpstreamFailed(f"the server ended the text with {reason!r}")  # vLLM's `abort`: another worker may go on
    ids = value.get("token_ids")
    if ids is None and value.get("text"):
        raise GenerationFailed("the server sends no token ids: it needs `return_token_ids`")
    tokens = tuple(ids or ())
    if not tokens and reason is None:
        return None
    details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
    return StepOutput(
        request_id,
        choice,
        choice,
        tokens,
        (Origin.PLAIN,) * len(tokens),
        num_cached=details.get("cached_tokens") or 0,
        logprobs=_logprobs(value.get("logprobs"), tokens) if wants_logprobs else None,
        finish_reason=None if reason is None else FINISH_REASONS[reason],
    )


def _logprobs(value: Mapping[str, Any] | None, tokens: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
    if not tokens:
        return ()
    if value is None or len(value["token_logprobs"]) != len(tokens):
        raise GenerationFailed("the server sent no log-probabilities")
    rows = value.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        _token_logprobs(token, logprob, row or {})
        for token, logprob, row in zip(tokens, value["token_logprobs"], rows, strict=True)
    )


def _token_logprobs(token: int, logprob: float, row: Mapping[str, float]) -> TokenLogprobs:
    try:
        top = tuple((int(text.removeprefix(TOKEN_ID)), value) for text, value in row.items())
    except ValueError:
        raise GenerationFailed("the server names alternatives by text: it needs `return_tokens_as_token_ids`") from None
    return TokenLogprobs(token, logprob, top, 1 + sum(value > logprob for _, value in top))


RUNNING = ("vllm:num_requests_running", "paceline_sequences_running")
WAITING = ("vllm:num_requests_waiting", "paceline_sequences_waiting")
KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "paceline_kv_use_ratio")
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)
_CACHE = re.compile(r"^vllm:cache_config_info\{([^}]*)\}", re.MULTILINE)
_LABEL = re.compile(r'\b(block_size|num_gpu_blocks)="(\d+)"')


@dataclass(frozen=True, slots=True)
class ServerLoad:
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    """Used share of the KV cache, 0 to 1."""


def parse_load(metrics: str) -> ServerLoad:
    """The load in a Prometheus text. Values that the text does not have are zero."""
    values: dict[str, float] = {}
    for name, value in _SAMPLE.findall(metrics):
        try:
            values[name] = values.get(name, 0.0) + float(value)
        except ValueError:
            continue

    def first(names: tuple[str, ...]) -> float:
        return next((values[name] for name in names if name in values), 0.0)

    return ServerLoad(int(first(RUNNING)), int(first(WAITING)), min(1.0, max(0.0, first(KV_USE))))


def parse_cache_tokens(metrics: str) -> int | None:
    """Tokens that the caches of all engines of a vLLM server hold. None if the text does not say."""
    sizes = [dict(_LABEL.findall(labels)) for labels in _CACHE.findall(metrics)]
    tokens = sum(int(size.get("block_size", 0)) * int(size.get("num_gpu_blocks", 0)) for size in sizes)
    return tokens or None


logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every call

TOO_MANY_REQUESTS = 429
BUSY_SECONDS = 0.25
"""Time after which a request that found a full queue is sent again."""
HEALTH_SECONDS = 0.5
"""Interval of health checks."""
HEALTH_TIMEOUT = 5.0
MAX_SILENT = 2
"""Health checks in a row without an answer after which the server is lost. A refused connection is enough by itself."""
CONNECT_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class ServerModel:
    """What the server says of its model."""

    name: str
    owner: str
    max_model_len: int | None


class UpstreamConnection:
    """Thread-safe. Listeners are called on the connection's thread. `on_change` follows every change of `is_healthy`."""

    def __init__(self, url: str, api_key: str | None, on_change: Callable[[], None]) -> None:
        try:
            import httpx
        except ImportError:
            raise MissingDependency("httpx", "a worker of another engine", "endpoints") from None
        self.url = url.rstrip("/").removesuffix("/v1")
        self.is_healthy = False
        """Whether the last check or stream reached the server."""
        self.load = ServerLoad()
        self.num_chunks = self.num_tokens = 0
        """Chunks of all streams; a busy server whose count stands still is stuck."""
        self._on_change = on_change
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits)
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="paceline-upstream", daemon=True)
        self._thread.start()

    def model(self, name: str | None = None) -> ServerModel:
        """The served model, or the model called `name`. Raises `UpstreamFailed` if the server does not answer."""

        async def read() -> ServerModel:
            answer = await self._client.get(f"{self.url}/v1/models", timeout=HEALTH_TIMEOUT)
            answer.raise_for_status()
            entries = {entry["id"]: entry for entry in answer.json()["data"]}
            entry = entries[name] if name in entries else next(iter(entries.values()))
            return ServerModel(entry["id"], str(entry.get("owned_by", "")), entry.get("max_model_len"))

        return self._wait(read())

    def tokens(self, model: str, text: str) -> list[int] | None:
        """Token ids that the server makes of a text. None if the server has no route for them."""

        async def read() -> list[int] | None:
            body = {"model": model, "prompt": text, "add_special_tokens": False}
            answer = await self._client.post(f"{self.url}/tokenize", json=body, timeout=HEALTH_TIMEOUT)
            return list(answer.json()["tokens"]) if answer.status_code == 200 and "tokens" in answer.json() else None

        return self._wait(read())

    def cache_tokens(self) -> int | None:
        """Tokens that the server's KV cache holds. None if the server does not report it."""

        async def read() -> int | None:
            answer = await self._client.get(f"{self.url}/metrics", timeout=HEALTH_TIMEOUT)
            return parse_cache_tokens(answer.text) if answer.status_code == 200 else None

        return self._wait(read())

    def watch(self) -> None:
        """Check the server's health from now on."""
        self._loop.call_soon_threadsafe(lambda: self._start(self._watch(), ""))

    def submit(
        self, request: Request, model: str, extra: dict[str, Any], listen: Callable[[OutputEvent], None]
    ) -> None:
        """Start every unfinished choice. `listen` gets their outputs, and an error at most once. `extra` joins the body."""

        def start() -> None:
            for choice in request.unfinished:
                body = {**completion_body(request, choice, model), **extra}
                self._start(self._stream(request, choice, body, listen), request.id)

        self._loop.call_soon_threadsafe(start)

    def cancel(self, request_id: str) -> None:
        """Stop a request. Its listener may still get an output that has arrived."""

        def stop() -> None:
            for task in self._tasks.pop(request_id, ()):
                task.cancel()

        self._loop.call_soon_threadsafe(stop)

    def close(self) -> None:
        async def end() -> None:
            tasks = [task for tasks in self._tasks.values() for task in tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        import httpx

        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop).result()
        except (httpx.HTTPError, httpx.InvalidURL, KeyError, ValueError, TypeError, StopIteration) as error:
            raise UpstreamFailed(f"{self.url} does not answer as an OpenAI-compatible server: {error!r}") from error

    def _start(self, call: Coroutine[Any, Any, None], request_id: str) -> None:
        task = self._loop.create_task(call)
        tasks = self._tasks.setdefault(request_id, set())
        tasks.add(task)

        def end(task: "asyncio.Task[None]") -> None:
            tasks.discard(task)
            if not tasks and self._tasks.get(request_id) is tasks:
                del self._tasks[request_id]

        task.add_done_callback(end)

    async def _watch(self) -> None:
        import httpx

        num_silent = 0
        while True:
            try:
                answer = await self._client.get(f"{self.url}/health", timeout=HEALTH_TIMEOUT)
                if answer.status_code == 404:  # no such route: the list of models shows as much
                    answer = await self._client.get(f"{self.url}/v1/models", timeout=HEALTH_TIMEOUT)
                is_healthy = answer.status_code < 500
                if is_healthy:
                    metrics = await self._client.get(f"{self.url}/metrics", timeout=HEALTH_TIMEOUT)
                    self.load = parse_load(metrics.text) if metrics.status_code == 200 else ServerLoad()
                num_silent = 0
            except httpx.ConnectError:
                is_healthy = False
            except httpx.HTTPError:  # a busy server may be late once
                num_silent += 1
                is_healthy = self.is_healthy and num_silent < MAX_SILENT
            self._set_health(is_healthy)
            await asyncio.sleep(HEALTH_SECONDS)

    def _set_health(self, is_healthy: bool) -> None:
        if is_healthy != self.is_healthy:
            self.is_healthy = is_healthy
            logger.warning("%s %s", self.url, "answers" if is_healthy else "is lost")
            self._on_change()

    async def _stream(
        self, request: Request, choice: int, body: dict[str, Any], listen: Callable[[OutputEvent], None]
    ) -> None:
        import httpx

        try:
            headers = {"traceparent": request.trace} if request.trace else {}
            while True:
                post = self._client.stream("POST", f"{self.url}/v1/completions", json=body, headers=headers)
                async with post as answer:
                    if answer.status_code == TOO_MANY_REQUESTS:
                        await asyncio.sleep(BUSY_SECONDS)  # its queue is full: no failure, the request waits here
                        continue
                    if answer.is_error:
                        raise _error(answer.status_code, (await answer.aread()).decode("utf-8", "replace"))
                    async for line in answer.aiter_lines():
                        chunk = parse_event(line)
                        if chunk is None:
                            continue
                        self.num_chunks += 1
                        output = step_output(chunk, request.id, choice, request.sampling.logprobs is not None)
                        if output is not None:
                            self.num_tokens += len(output.tokens)
                            listen(output)
                            if output.finish_reason is not None:
                                return
                    break
            raise UpstreamFailed(f"{self.url} ended a stream without a reason")
        except httpx.HTTPError as error:
            if isinstance(error, httpx.TransportError):
                self._set_health(False)
            listen(UpstreamFailed(f"{self.url} was lost: {error!r}"))
        except PacelineError as error:
            listen(error)
        except Exception as error:  # No request may end the worker for the remaining requests
            logger.exception("a stream of %s failed", self.url)
            listen(UpstreamFailed(f"a stream of {self.url} failed: {error!r}"))


def _error(status: int, text: str) -> PacelineError:
    """The error of a response: whose fault it is decides whether another worker gets the request."""
    message = f"the server answered {status}: {text[:500]}"
    if status in (400, 413, 422):
        return InvalidRequest(message)
    if status in (401, 403, 404):
        return GenerationFailed(message)
    return UpstreamFailed(message)
