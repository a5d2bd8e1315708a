"""Engine requests from request bodies: prompt tokens, sampling parameters, traffic category.

For a model whose chat template has no tools, tools and calls are written as text of the prompt.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from starlette.requests import Request as HttpRequest

from paceline.core.errors import InvalidRequest, PromptTooLong, TextTooLong
from paceline.core.machine import measured
from paceline.core.request import Constraint, Request, SamplingParams, SpeculationParams
from paceline.gateway.api.bodies import (
    GenerationBody,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from paceline.gateway.api.chat_bodies import ChatBody
from paceline.gateway.api.messages import (
    AnyMessage,
    AnyTool,
    conversation_length,
    template_message,
    template_tools,
)
from paceline.gateway.bodies import FairThreads, Owner
from paceline.gateway.sessions import RequestSession
from paceline.model_files.tokenizer import ChatTemplate, Tokenizer
from paceline.requests import categorise

HERMES_PROMPT = """\
You may call one or more functions to help with the user's request. Their signatures are between <tools></tools>:
<tools>
{tools}
</tools>
For each call write a JSON object with the function's name and arguments between <tool_call></tool_call>:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


def write_tools_as_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with tools and calls as text in the Hermes format, for a chat template without tools."""
    texts = [_message_as_text(message) for message in messages]
    if not tools:
        return texts
    prompt = HERMES_PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if texts[0]["role"] == "system":
        return [{"role": "system", "content": f"{texts[0]['content']}\n\n{prompt}"}, *texts[1:]]
    return [{"role": "system", "content": prompt}, *texts]


def _message_as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(call["function"]["name"])}, "arguments": {call["function"]["arguments"]}}}\n'
        "</tool_call>"
        for call in message.get("tool_calls", ())
    )
    content = "\n".join(part for part in (message["content"], calls) if part)
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content}


def with_system_first(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template that takes one system message, at the start, and users and assistants in turn. Agents send
    several, also later ones: those become parts of the user's messages."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        is_start = all(other["role"] == "system" for other in merged)
        role = "user" if message["role"] == "system" and not is_start else message["role"]
        if merged and merged[-1]["role"] == role and role in ("system", "user"):
            merged[-1] = {**merged[-1], "content": f"{merged[-1]['content']}\n\n{message['content']}"}
        else:
            merged.append({**message, "role": role})
    return merged


THREAD_CHARS = 8192
"""Prompt length in characters from which tokenization runs on another thread, so that streams continue."""
THREAD_MESSAGES = 64
"""Messages from which a conversation is rendered on another thread."""
CATEGORY_HEADER = "x-paceline-category"
MAX_CATEGORY_CHARS = 64
CATEGORY_TOKENS = 512
"""Tokens at the end of a prompt that decide its category."""
FILL_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),
)
"""Tokens before the text in front of a gap, before the text behind it, and before the text that fills it: of Qwen and Gemma, of
StarCoder and Granite, of DeepSeek."""
MISTRAL_CALLS = "[TOOL_CALLS]"
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
DEFAULTED_PARAMS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Parameters whose default the server's configuration or the model sets."""


class PromptEncoder:
    """Token ids of texts and conversations."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_chars: int,
        threads: FairThreads,
        charge: Callable[[Owner, str, float], None],
    ) -> None:
        """`max_chars` is the length beyond which a text is refused without encoding it. `threads` encode long texts. `charge`
        receives the processor seconds of work for an owner, from any thread."""
        self._tokenizer, self._max_chars, self._threads = tokenizer, max_chars, threads
        self._charge = charge

    def _check_length(self, num_chars: int, field: str) -> None:
        """Raises `TextTooLong` for a text that cannot fit into the context window."""
        if num_chars > self._max_chars:
            raise TextTooLong(num_chars, self._max_chars, field)

    async def encode_text(
        self, owner: Owner, text: str, add_special: bool = True, field: str = "prompt"
    ) -> tuple[int, ...]:
        """Raises `TextTooLong`, before it encodes, for a text that cannot fit into the context window."""
        self._check_length(len(text), field)
        work = partial(measured, partial(self._charge, owner, "text"), self._tokenizer.encode, text, add_special)
        return tuple(work() if len(text) < THREAD_CHARS else await self._threads.run(owner, len(text), work))

    def fill_in(self, prompt: str, suffix: str) -> str:
        """The text whose continuation fills the gap between the prompt and the suffix."""
        if not suffix:
            return prompt
        vocab = self._tokenizer.vocab
        tokens = next((tokens for tokens in FILL_TOKENS if vocab.keys() >= set(tokens)), None)
        if tokens is None:
            raise InvalidRequest("this model has no tokens for filling in the middle: send no suffix", "suffix")
        before, behind, fill = tokens
        return f"{before}{prompt}{behind}{suffix}{fill}"

    async def encode_messages(
        self,
        owner: Owner,
        messages: Sequence[AnyMessage],
        tools: Sequence[AnyTool] = (),
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        start: str = "",
    ) -> tuple[int, ...]:
        """Renders the model's chat template. Tools become text if the template does not support them. `start` is the text
        with which the answer begins."""
        num_chars = conversation_length(messages, tools) + len(start)
        self._check_length(num_chars, "messages")
        values = messages, tools, add_generation_prompt, variables
        work = partial(measured, partial(self._charge, owner, "template"), self._render, *values)
        needs_thread = tools or num_chars > THREAD_CHARS or len(messages) > THREAD_MESSAGES
        text = await self._threads.run(owner, num_chars, work) if needs_thread else work()
        return await self.encode_text(owner, text + start, add_special=False, field="messages")

    def _render(
        self,
        messages: Sequence[AnyMessage],
        tools: Sequence[AnyTool],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> str:
        values = [template_message(message) for message in messages]
        tool_values = template_tools(tools)
        if MISTRAL_CALLS in (self._tokenizer.chat_template or ""):
            values = [_with_short_ids(value) for value in values]
        try:
            return self._render_values(values, tool_values, add_generation_prompt, variables)
        except InvalidRequest:
            merged = with_system_first(values)
            if merged == values:
                raise
            return self._render_values(merged, tool_values, add_generation_prompt, variables)

    def _render_values(
        self,
        values: list[dict[str, Any]],
        tool_values: list[dict[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
    ) -> str:
        if self._template_has_tools:
            parsed = [_with_parsed_arguments(value) for value in values]
            try:
                return self._template.render(parsed, add_generation_prompt, tool_values or None, variables)
            except InvalidRequest:
                if parsed == values:
                    raise
                # Some templates join arguments with texts
                return self._template.render(values, add_generation_prompt, tool_values or None, variables)
        values = write_tools_as_text(values, tool_values)
        return self._template.render(values, add_generation_prompt, variables=variables)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.of(self._tokenizer)

    @cached_property
    def _template_has_tools(self) -> bool:
        return "tools" in (self._tokenizer.chat_template or "")


def truncate_prompt(prompt: tuple[int, ...], body: GenerationBody, max_model_len: int) -> tuple[int, ...]:
    """The last tokens of the prompt that `truncate_prompt_tokens` keeps. Raises `PromptTooLong` for a prompt that is not
    truncated and leaves no room in the context window: further prompts of the body are not encoded."""
    count = body.truncate_prompt_tokens
    if count is None:
        if len(prompt) >= max_model_len:
            raise PromptTooLong(len(prompt), max_model_len, "messages" if isinstance(body, ChatBody) else "prompt")
        return prompt
    if count == -1:
        count = max(1, max_model_len - (body.token_limit or 1))
    return prompt[-count:] if count else ()


def build_requests(
    http: HttpRequest,
    body: GenerationBody,
    session: RequestSession,
    answer_id: str,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    topic: str | None = None,
) -> list[Request]:
    """One engine request per prompt. Its id is `answer_id`, followed by the number of the prompt if there are several. `topic`
    is the text that decides the category. If it is None, the end of the prompt decides."""
    http.state.request_id = answer_id
    category = read_category(http, body)
    if category:
        category = session.gateway.categories.fold(category, session.key.id)
    return [
        Request(
            id=answer_id if len(prompts) == 1 else f"{answer_id}/{number}",
            prompt_ids=prompt,
            sampling=sampling,
            speculation=speculation_params(body, session.is_strict),
            category=category or _infer_category(prompt, sampling, topic, session.gateway.tokenizer),
            priority=max(body.priority, session.key.share.priority),
            tenant=session.key.id,
            weight=session.key.share.weight,
            cache_salt=session.key.salt_cache(body.cache_salt or ""),
            trace=getattr(http.state, "trace", ""),
        )
        for number, prompt in enumerate(prompts)
    ]


def sampling_params(
    body: GenerationBody,
    defaults: SamplingParams,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    seed: int,
    constraint: Constraint | None,
    extra_stops: tuple[str, ...] = (),
    skip_special_tokens: bool | None = None,
) -> SamplingParams:
    """The body's sampling parameters. `defaults` has those of requests that set none; `seed` applies if the body has none."""
    chosen = {
        name: getattr(defaults, name) if getattr(body, name) is None else getattr(body, name)
        for name in DEFAULTED_PARAMS
    }
    chosen["top_k"] = max(0, chosen["top_k"])  # vLLM writes -1 for no limit
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        **chosen,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens if skip_special_tokens is None else skip_special_tokens,
        seed=seed if body.seed is None else body.seed,
        n=body.n or 1,
        stop=stop + extra_stops,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        json_schema=None if isinstance(constraint, str) else constraint,
        grammar=constraint if isinstance(constraint, str) else None,
    )


def output_constraint(body: GenerationBody) -> Constraint | None:
    """The JSON schema or the grammar that the body sets for the output; None for any text."""
    form, outputs = body.response_format, body.outputs
    if isinstance(form, JsonObjectFormat):
        return {"type": "object"}
    if isinstance(form, JsonSchemaFormat):
        return form.json_schema.schema_
    if outputs is None:
        return None
    if outputs.json_ is not None:
        return _schema(outputs.json_)
    if outputs.regex is not None:
        return f"start: /{SLASH.sub(_escaped, outputs.regex)}/"
    if outputs.choice is not None:
        return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in outputs.choice)
    return outputs.grammar or {"type": "object"}


SLASH = re.compile(r"\\.|[/\n]", re.DOTALL)
"""What a regular expression between slashes cannot have as it is, and what it has escaped already."""


def _escaped(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(match[0], match[0])


def _schema(schema: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """The schema, which vLLM's clients may send as JSON text."""
    if not isinstance(schema, str):
        return schema
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest("the text of a JSON schema must be a JSON object", "structured_outputs")
    return value


def speculation_params(body: GenerationBody, is_strict: bool) -> SpeculationParams:
    """The body's speculation options. Strict mode turns speculation off."""
    if is_strict:
        return SpeculationParams(enabled=False)
    if body.speculation is None:
        return SpeculationParams()
    return SpeculationParams(**body.speculation.model_dump(exclude={"strict"}))


def read_category(http: HttpRequest, body: GenerationBody) -> str:
    """The traffic category in the header or the body; empty if the client sends none."""
    category = http.headers.get(CATEGORY_HEADER) or (body.metadata or {}).get("category") or ""
    if len(category) > MAX_CATEGORY_CHARS or not category.isprintable():
        raise InvalidRequest(
            f"a category must have at most {MAX_CATEGORY_CHARS} printable characters", "metadata.category"
        )
    return category


def _infer_category(prompt: tuple[int, ...], sampling: SamplingParams, topic: str | None, tokenizer: Tokenizer) -> str:
    is_json = sampling.json_schema is not None
    if topic is None and not is_json:
        topic = tokenizer.decode(prompt[-CATEGORY_TOKENS:])
    return categorise(topic or "", len(prompt), is_json)


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message with ids of calls as the templates of Mistral require them: nine letters and digits."""
    message = dict(message)
    if "tool_call_id" in message:
        message["tool_call_id"] = _short_id(message["tool_call_id"])
    if "tool_calls" in message:
        message["tool_calls"] = [{**call, "id": _short_id(call["id"])} for call in message["tool_calls"]]
    return message


def _short_id(call_id: str) -> str:
    return call_id if SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with objects in place of JSON strings: most templates serialize arguments, and would quote a string."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        try:
            arguments = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            arguments = call["function"]["arguments"]
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}
