"""What the routes share: the gateway, and how a body becomes the engine's requests."""

import hashlib
from collections.abc import Sequence
from dataclasses import astuple
from functools import partial

from starlette.requests import Request as HttpRequest

from paceline.core.errors import InvalidRequest
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.models.drafts.compatibility import fingerprint
from paceline.server.auth.middleware import caller_of
from paceline.server.auth.rate_limit import RateLimits
from paceline.server.auth.strict import StrictMode
from paceline.server.gateway.categorise import categorise
from paceline.server.gateway.gateway import Gateway
from paceline.server.gateway.session import Visit
from paceline.server.openai.errors import BadRequest, NotFound
from paceline.server.openai.params import speculation_params
from paceline.server.openai.prompts import Prompts
from paceline.server.openai.schemas.generation import GenerationBody
from paceline.server.request_log import RequestLog

CATEGORY_HEADER = "x-paceline-category"
MAX_CATEGORY = 64
TAIL = 512
"""Tokens of a prompt that tell its kind."""


class Service:
    def __init__(self, gateway: Gateway, strict: StrictMode | None) -> None:
        self.gateway = gateway
        self.strict = strict
        self.limits = RateLimits(gateway.metrics.clock)
        as_read = partial(gateway.llm.tokenizer.decode, skip_special=False)  # turns can be told apart
        self.log = RequestLog(gateway.config.log_requests, as_read)
        self.llm = gateway.llm
        self.model = gateway.config.model_name
        self.tokenizer = gateway.llm.tokenizer
        self.prompts = Prompts(self.tokenizer)
        if strict is not None and gateway.config.audit_trail_text:
            strict.decode = self.tokenizer.decode
        parts = (self.llm.config.model, self.llm.config.dtype, *astuple(fingerprint(self.tokenizer)))
        self.fingerprint = "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise NotFound(
                f"the model {name!r} is not served here; this is {self.model!r}", param="model", code="model_not_found"
            )

    def visit(self, http: HttpRequest, body: GenerationBody | None = None) -> Visit:
        """Strict if the caller's key is, or the body asks for it."""
        key = caller_of(http)
        is_asked = body is not None and body.speculation is not None and body.speculation.strict
        if not key.strict and not is_asked:
            return Visit(key, self.limits, self.gateway.metrics, None, self.log)
        if self.strict is None:
            raise BadRequest(
                "strict mode records what it generates, and this server keeps no record: set `audit_trail`",
                param="speculation.strict",
                code="strict_unavailable",
            )
        return Visit(key, self.limits, self.gateway.metrics, self.strict, self.log)

    def requests(
        self,
        http: HttpRequest,
        body: GenerationBody,
        visit: Visit,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        said: str | None = None,
    ) -> list[Request]:
        """One for each prompt. `said` is what they are about; None: their own text."""
        named = category_of(http, body)
        return [
            Request(
                id=self.gateway.request_id(),
                prompt_ids=prompt,
                sampling=sampling,
                speculation=speculation_params(body, visit.is_strict),
                category=named or self._category(prompt, sampling, said),
                priority=body.priority,
                cache_salt=visit.key.salted(body.cache_salt or ""),
                trace=getattr(http.state, "trace", ""),
            )
            for prompt in prompts
        ]

    def _category(self, prompt: tuple[int, ...], sampling: SamplingParams, said: str | None) -> str:
        is_json = sampling.json_schema is not None
        if said is None and not is_json:
            said = self.tokenizer.decode(prompt[-TAIL:])
        return categorise(said or "", len(prompt), is_json)


def category_of(http: HttpRequest, body: GenerationBody) -> str:
    """The kind of traffic, as the caller names it; empty: they do not."""
    category = http.headers.get(CATEGORY_HEADER) or (body.metadata or {}).get("category") or ""
    if len(category) > MAX_CATEGORY or not category.isprintable():
        raise InvalidRequest(f"a category has up to {MAX_CATEGORY} printable characters", "metadata.category")
    return category
