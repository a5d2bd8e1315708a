"""A target that generates the text a test sets, and an application around it."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, cast

import httpx
from fastapi import FastAPI
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paceline.core.config import EngineConfig
from paceline.core.errors import EngineClosed
from paceline.core.output import OutputListener, StepOutput, TokenLogprobs
from paceline.core.request import Request, SpeculationFlags
from paceline.core.sequence import FinishReason, Origin
from paceline.core.status import ClusterStatus, DraftStatus, DraftSwapStatus, EngineStatus, WeightsStatus, WorkerStatus
from paceline.gateway.audit.audit_log import AuditLog
from paceline.gateway.audit.strict import StrictMode
from paceline.gateway.auth.access import Access
from paceline.gateway.config.config import ServerConfig
from paceline.gateway.config.flags import FlagStore
from paceline.gateway.http.app import create_app
from paceline.gateway.metrics.metrics import Metrics
from paceline.gateway.sessions.gateway import Gateway
from paceline.gateway.sessions.models import ServedModels
from paceline.model_files.tokenizer.tokenizer import Tokenizer
from paceline.requests.validator import Limits, RequestValidator
from paceline.targets.client import TargetClient
from paceline.wire.gateway_messages import TokensReply

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(template: str | None = TEMPLATE, special: tuple[str, ...] = ()) -> Tokenizer:
    """A tokenizer with one token per byte, and special tokens."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", *special)])
    return Tokenizer(backend, bos_id=None, eos_ids=[257], special_tokens={}, chat_template=template)


FINGERPRINT = "fp_0123456789abcdef"


class FakeTarget:
    """Generates `text(request)` for every request, `per_step` tokens per step, all but one drafted. With `hold` it generates
    nothing until `release`."""

    def __init__(
        self,
        text: Callable[[Request], str],
        per_step: int,
        hold: bool,
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer or byte_tokenizer()
        self.is_running = True
        self.is_overloaded = False
        self.max_model_len = config.max_model_len or 4096
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.draft_statuses: dict[str, DraftStatus] = {}
        """The drafts inside the engines of its workers."""
        self.swaps: list[tuple[str, float, float]] = []
        self.fingerprint = FINGERPRINT
        self.weights_statuses: dict[str, WeightsStatus | None] = {"engine-0": None}
        """The last change of the weights of its workers."""
        self.changes: list[tuple[str, str, float]] = []
        self.refusals: dict[str, str] = {}
        """Why workers refuse a change of weights."""
        self.settled: list[bool] = []
        self._text, self._per_step, self._hold = text, per_step, hold
        self._held: dict[str, tuple[Request, OutputListener]] = {}
        limits = Limits(self.tokenizer.vocab_size, self.max_model_len, max_depth=8)
        self._validator = RequestValidator(limits, "coupled", "ngram", ["ngram"], self.tokenizer)
        self.kv_tokens = config.kv_tokens or 1 << 20
        self.max_num_seqs, self.max_depth = config.max_num_seqs or 64, limits.max_depth
        self.validate, self.validate_flags = self._validator.validate, self._validator.validate_flags
        self.methods = tuple(self._validator.methods)

    @property
    def failure(self) -> str | None:
        return None if self.is_running else "the engine has stopped: restart the server"

    def submit(self, request: Request, listener: OutputListener) -> None:
        if not self.is_running:
            raise EngineClosed("the engine was shut down: make a new LLM")
        self.requests.append(request)
        self._held[request.id] = request, listener
        if not self._hold:
            self.release()

    def release(self) -> None:
        """Generates the outputs of all held requests."""
        while self._held:
            request, listener = self._held.pop(next(iter(self._held)))
            for choice in request.unfinished:
                for output in self._outputs(request, choice):
                    listener(output)

    def fail(self) -> None:
        """Fails like an engine that has stopped."""
        self.is_running = False
        for _, listener in self._held.values():
            listener(EngineClosed("the engine failed"))

    def request_tokens(self, key: str) -> "Future[TokensReply | None]":
        """The tokens of a request with this resume key, as far as they would be generated."""
        future: Future[TokensReply | None] = Future()
        found = [request for request in self.requests if request.resume_key == key]
        ids = self.tokenizer.encode(self._text(found[-1]), add_special=False) if found else []
        choices = [list(ids) for _ in range(found[-1].sampling.n)] if found else []
        future.set_result(TokensReply(1, found[-1].sampling.seed, choices) if found else None)
        return future

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self._held.pop(request_id, None)

    def set_flags(self, flags: SpeculationFlags) -> None:
        self._validator.set_flags(flags)

    def _outputs(self, request: Request, choice: int) -> list[StepOutput]:
        ids = self.tokenizer.encode(self._text(request), add_special=False)
        limit = min(request.sampling.max_tokens, self.max_model_len - len(request.prompt_ids))
        reason = FinishReason.STOP if len(ids) <= limit else FinishReason.LENGTH
        committed = request.committed[choice] or () if request.committed else ()
        ids = ids[len(committed) : limit]
        steps = [ids[i : i + self._per_step] for i in range(0, len(ids), self._per_step)] or [[]]
        outputs = [self._output(request, choice, tokens) for tokens in steps]
        top = request.sampling.prompt_logprobs
        if top is not None and choice == 0:
            scores = (
                TokenLogprobs(t, -0.25, tuple((o, -0.5 - o) for o in range(top)), 4) for t in request.prompt_ids[1:]
            )
            outputs[0] = replace(outputs[0], prompt_logprobs=tuple(scores))
        return [*outputs[:-1], replace(outputs[-1], finish_reason=reason)]

    def _output(self, request: Request, choice: int, tokens: Sequence[int]) -> StepOutput:
        top = request.sampling.logprobs
        drafted = len(tokens) - 1
        return StepOutput(
            request_id=request.id,
            sequence_id=choice,
            choice=choice,
            tokens=tuple(tokens),
            origins=(Origin.ACCEPTED,) * max(0, drafted) + (Origin.BONUS,) * bool(tokens),
            drafted=max(0, drafted),
            accepted=max(0, drafted),
            num_cached=3,
            logprobs=None
            if top is None
            else tuple(TokenLogprobs(t, -0.5, tuple((o, -0.5 - o) for o in range(top))) for t in tokens),
            fingerprint=self.fingerprint,
        )

    @property
    def is_ready(self) -> bool:
        return self.is_running

    def close(self) -> None:
        self.is_running = False

    def cluster_status(self) -> ClusterStatus:
        state = "ready" if self.is_running else "unhealthy"
        return ClusterStatus((WorkerStatus("engine-0", "engine", "target", state, ""),), 0)

    def drafts(self) -> dict[str, DraftStatus]:
        return self.draft_statuses

    def swap_draft(self, draft: str, seconds: float, period: float) -> int:
        self.swaps.append((draft, seconds, period))
        for name, status in self.draft_statuses.items():
            is_end = not draft and status.swap is not None
            swap = DraftSwapStatus(len(self.swaps), draft, "continue", "the new draft loads")
            if is_end and status.swap is not None:
                swap = replace(status.swap, verdict="roll back", reason="the trial was interrupted")
            self.draft_statuses[name] = replace(status, swap=swap)
        return len(self.swaps)

    def weights(self) -> dict[str, WeightsStatus | None]:
        return self.weights_statuses

    def change_weights(self, folder: str, peer: str, seconds: float) -> int:
        self.changes.append((folder, peer, seconds))
        number = len(self.changes)
        for name in self.weights_statuses:
            reason = self.refusals.get(name, "")
            self.weights_statuses[name] = WeightsStatus(number, folder or peer, "failed" if reason else "done", reason)
        if not self.refusals:
            self.fingerprint = f"fp_{number}"
        return number

    def settle_weights(self, is_kept: bool) -> None:
        self.settled.append(is_kept)

    def engine_status(self) -> EngineStatus:
        return EngineStatus(0, 0, 0, 8, 0, 0, self._validator.flags, ())


@dataclass
class Served:
    target: FakeTarget
    gateway: Gateway
    app: FastAPI

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://server", timeout=30)

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            async with self.client() as client:
                return await client.request(method, path, **options)

        return asyncio.run(run())

    def post(self, path: str, body: Mapping[str, Any], **options: Any) -> httpx.Response:
        return self.call("POST", path, json=body, **options)


def served(
    text: str | Callable[[Request], str] = "Hello there!",
    *,
    per_step: int = 3,
    hold: bool = False,
    engine: EngineConfig | None = None,
    tokenizer: Tokenizer | None = None,
    clock: Callable[[], float] = time.monotonic,
    **config: Any,
) -> Served:
    """An application with a `FakeTarget`; `config` sets fields of `ServerConfig`."""
    engine = engine or EngineConfig(model="fake", max_num_seqs=4, max_model_len=4096)
    settings = ServerConfig(engine=engine, **config)
    target = FakeTarget((lambda request: text) if isinstance(text, str) else text, per_step, hold, engine, tokenizer)
    flags = FlagStore(None, target.validate_flags)
    flags.subscribe(target.set_flags)
    metrics = Metrics(settings.model_name, clock)
    metrics.add_engine(target.engine_status)
    strict = None
    if settings.audit_trail is not None:
        strict = StrictMode(AuditLog(settings.audit_trail), settings.model_name, "0" * 64, engine)
    access = Access.from_config(settings, clock)
    gateway = Gateway(cast(TargetClient, target), settings, metrics, flags, strict, access.reserved_shares)
    return Served(target, gateway, create_app(ServedModels([gateway]), access))


def events(response: httpx.Response) -> list[str]:
    """The data of every server-sent event."""
    assert response.headers["content-type"].startswith("text/event-stream")
    return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
