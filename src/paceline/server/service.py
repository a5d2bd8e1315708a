"""What the routes share: the gateway, and how a body becomes the engine's requests."""

import hashlib
from collections.abc import Sequence
from dataclasses import astuple

from starlette.requests import Request as HttpRequest

from paceline.core.errors import InvalidRequest
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.models.compatibility import fingerprint
from paceline.server.errors import NotFound
from paceline.server.gateway import Gateway
from paceline.server.params import speculation_params
from paceline.server.prompts import Prompts
from paceline.server.schemas.generation import GenerationBody

CATEGORY_HEADER = "x-paceline-category"
MAX_CATEGORY = 64


class Service:
    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.llm = gateway.llm
        self.model = gateway.config.model_name
        self.tokenizer = gateway.llm.tokenizer
        self.prompts = Prompts(self.tokenizer)
        parts = (self.llm.config.model, self.llm.config.dtype, *astuple(fingerprint(self.tokenizer)))
        self.fingerprint = "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise NotFound(
                f"the model {name!r} is not served here; this is {self.model!r}", param="model", code="model_not_found"
            )

    def requests(
        self, http: HttpRequest, body: GenerationBody, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams
    ) -> list[Request]:
        """One for each prompt."""
        category = category_of(http, body)
        return [
            Request(
                id=self.gateway.request_id(),
                prompt_ids=prompt,
                sampling=sampling,
                speculation=speculation_params(body),
                category=category,
                priority=body.priority,
                cache_salt=body.cache_salt or "",
            )
            for prompt in prompts
        ]


def category_of(http: HttpRequest, body: GenerationBody) -> str:
    """The kind of traffic, as the caller names it."""
    category = http.headers.get(CATEGORY_HEADER) or (body.metadata or {}).get("category") or "default"
    if len(category) > MAX_CATEGORY or not category.isprintable():
        raise InvalidRequest(f"a category has up to {MAX_CATEGORY} printable characters", "metadata.category")
    return category
