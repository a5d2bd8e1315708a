"""What the routes need of each model, and the path of a chat request: from its body to the response that generates.

The routes of other APIs translate their bodies to `ChatBody`, and make their own answers of a `ChatStart`.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from paceline.core.request import ValidatedRequest, draw_seed
from paceline.gateway.api.chat_bodies import ChatBody
from paceline.gateway.api.messages import last_user_text
from paceline.gateway.api.responses import Model
from paceline.gateway.bodies import owner_of
from paceline.gateway.formats import AnswerFormat, AnswerParser
from paceline.gateway.openai.answer import AnswerContext
from paceline.gateway.openai.requests import (
    PromptEncoder,
    build_requests,
    output_constraint,
    sampling_params,
    truncate_prompt,
)
from paceline.gateway.openai.response import SentAnswer, respond
from paceline.gateway.openai.tools import ToolUse, answer_parser, stops
from paceline.gateway.sessions import Gateway, RequestSession, ServedModels

PROMPT_END = 32
"""Tokens at the end of a prompt, which show whether the answer begins with reasoning."""
EVENTS: dict[str, Any] = {"text/event-stream": {"example": "data: {...}\n\ndata: [DONE]\n\n"}}


def new_id(prefix: str) -> str:
    """A random id of an answer."""
    return f"{prefix}{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ChatStart:
    """A validated chat request, of which an answer is made."""

    id: str
    requests: Sequence[ValidatedRequest]
    context: AnswerContext
    body: ChatBody
    new_parser: Callable[[], AnswerParser]
    """Makes the parser of a choice."""
    custom: frozenset[str]
    """Names of the tools whose input is a text."""
    continues_prompt: bool = False
    """Whether the text follows the prompt's text. If not, it does not begin with the space of a SentencePiece token."""


class ModelService:
    """One model, as the routes use it."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway, self.target, self.tokenizer = gateway, gateway.target, gateway.tokenizer
        self.defaults, self.max_output = gateway.sampling, gateway.config.sampling.max_tokens
        self.encoder = PromptEncoder(gateway.tokenizer, gateway.max_chars, gateway.encoders, gateway.charge_cpu)
        self.context = AnswerContext(gateway.model, gateway.target.max_depth, gateway.tokenizer)
        settings = gateway.config
        self._format = AnswerFormat.of(gateway.tokenizer.chat_template, settings.tool_parser, settings.reasoning_parser)
        self._special_texts = {gateway.tokenizer.token(token) for token in gateway.tokenizer.special_ids}
        self._card = Model(
            id=gateway.model,
            object="model",
            created=int(time.time()),
            owned_by="paceline",
            root=gateway.target.config.model,
            max_model_len=gateway.target.max_model_len,
            has_chat_template=gateway.tokenizer.chat_template is not None,
        )

    @property
    def card(self) -> Model:
        """The model's card, with the fingerprint that its workers have now."""
        return self._card.model_copy(update={"system_fingerprint": self.target.fingerprint or None})

    @property
    def has_reasoning(self) -> bool:
        """Whether the model may write reasoning before its answer."""
        return self._format.has_reasoning

    async def encode_chat(self, body: ChatBody, http: HttpRequest) -> tuple[int, ...]:
        """Token ids of the conversation, rendered with the chat template."""
        tools = () if body.tool_choice == "none" else body.tools or ()
        has_start = body.add_generation_prompt or body.continue_final_message
        return await self.encoder.encode_messages(
            owner_of(http.scope), body.rendered, tools, has_start, body.template_variables, body.prefill
        )

    async def chat(
        self,
        answer_id: str,
        body: ChatBody,
        http: HttpRequest,
        new_answer: Callable[[ChatStart], SentAnswer],
        text: str | None = None,
    ) -> Response:
        """Encodes the messages and generates the next one. `new_answer` makes the answer, with the id `answer_id`. With `text`,
        the answer continues that text in place of the messages."""
        session = RequestSession.open(self.gateway, http, body)
        session.check_limits(1, body.n or 1)
        answer_form = output_constraint(body)
        tool_use = ToolUse.from_body(body, answer_form)
        if text is None:
            prompt = await self.encode_chat(body, http)
        else:
            prompt = await self.encoder.encode_text(owner_of(http.scope), text)
        prompt = truncate_prompt(prompt, body, self.target.max_model_len)
        constraint = tool_use.json_schema if tool_use else answer_form
        markers = self._format.markers(tool_use is not None)
        needs_special = constraint is None and not self._special_texts.isdisjoint(markers)
        sampling = sampling_params(
            body,
            self.defaults,
            max_tokens=body.token_limit or self.max_output or self.target.max_model_len,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            seed=draw_seed(),
            constraint=constraint,
            extra_stops=stops(self._format, tool_use),
            skip_special_tokens=body.skip_special_tokens and not needs_special,
        )
        bare = build_requests(http, body, session, answer_id, [prompt], sampling, last_user_text(body.messages))
        schema_field = "tools" if body.is_call_forced else "response_format"
        requests = await session.validate(bare, body.timeout, schema_field, "messages")
        prompt_end = self.tokenizer.decode(prompt[-PROMPT_END:], skip_special=False)
        new_parser = partial(answer_parser, self._format, tool_use, prompt_end, constraint is not None)
        custom = tool_use.custom_names if tool_use else frozenset[str]()
        start = ChatStart(answer_id, requests, self.context, body, new_parser, custom, text is not None)
        answer = new_answer(start)
        return await respond(session, answer, body, http)

    async def count_tokens(self, body: ChatBody, http: HttpRequest) -> int:
        """Tokens of the conversation. It waits for no generation."""
        RequestSession.open(self.gateway, http).charge_call()
        return len(await self.encode_chat(body, http))


class ModelServices:
    """The models of one server."""

    def __init__(self, models: ServedModels) -> None:
        self.models = models
        self._services = {gateway: ModelService(gateway) for gateway in models}

    def __iter__(self) -> Iterator[ModelService]:
        return iter(self._services.values())

    def of(self, name: str | None) -> ModelService:
        """The model with this name. Raises `NotFound`, or `BadRequest` if the name is missing and there are several models."""
        return self._services[self.models.of(name)]
