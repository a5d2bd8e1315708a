"""Responses and chunks of /v1/chat/completions: text, reasoning and tool calls."""

import json
from collections.abc import Iterable
from typing import Any

from paceline.core.output import StepOutput, TokenLogprobs
from paceline.gateway.api.messages import INPUT
from paceline.gateway.formats import AnswerParser, CallDelta, Reasoning
from paceline.gateway.openai.answer import MIN_LOGPROB, Answer, prompt_logprobs
from paceline.gateway.openai.service import ChatStart
from paceline.model_files.tokenizer import Tokenizer


class _ChatChoice:
    """The message of one choice, as far as it is generated."""

    def __init__(self, parser: AnswerParser, custom: frozenset[str], has_reasoning: bool) -> None:
        """`custom` has the names of the tools whose input is a text. Without `has_reasoning` reasoning is left out."""
        self._parser, self._custom, self._has_reasoning = parser, custom, has_reasoning
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._has_role = False
        self.logprobs: list[dict[str, Any]] = []
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None

    def add(self, output: StepOutput) -> dict[str, Any]:
        """The `delta` of this step."""
        pieces = self._parser.push(output.text)
        if output.finish_reason is not None:
            pieces += self._parser.flush()
        delta: dict[str, Any] = {}
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [piece for piece in pieces if isinstance(piece, CallDelta)]
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        if reasoning and self._has_reasoning:
            self._reasoning.append(reasoning)
            delta |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if text:
            self._content.append(text)
            delta["content"] = text
        parts = [part for call in calls if (part := self._add_call(call)) is not None]
        if output.finish_reason is not None:
            parts += self._custom_calls()
        if parts:
            delta["tool_calls"] = parts
        if output.finish_reason is not None:
            reason = output.finish_reason.value
            self.finish_reason = "tool_calls" if self._calls and reason == "stop" else reason
        if not self._has_role and (delta or output.finish_reason is not None):
            self._has_role = True
            delta = {"role": "assistant", "content": None if parts else "", **delta}
        return delta

    def message(self) -> dict[str, Any]:
        content: str | None = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._reasoning:
            reasoning = "".join(self._reasoning)
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if self._calls:
            message |= {"content": content or None, "tool_calls": self._calls}
        return message

    def _add_call(self, call: CallDelta) -> dict[str, Any] | None:
        """The part of the chunk; None for a call of a custom tool, which is sent when it is complete."""
        if call.id is None:
            self._calls[call.index]["function"]["arguments"] += call.arguments
            part = {"index": call.index, "function": {"arguments": call.arguments}}
        else:
            function = {"name": call.name, "arguments": call.arguments}
            self._calls.append({"id": call.id, "type": "function", "function": dict(function)})
            part = {"index": call.index, "id": call.id, "type": "function", "function": function}
        return None if self._calls[call.index]["function"]["name"] in self._custom else part

    def _custom_calls(self) -> list[dict[str, Any]]:
        """The calls of custom tools, at the end of the output. Their only argument becomes their input."""
        parts = []
        for index, call in enumerate(self._calls):
            function = call["function"]
            if function["name"] in self._custom:
                custom = {"name": function["name"], "input": only_text(function["arguments"])}
                self._calls[index] = {"id": call["id"], "type": "custom", "custom": custom}
                parts.append({"index": index, **self._calls[index]})
        return parts


def only_text(arguments: str) -> str:
    """The argument `input`; the arguments as they are if they have none, or were cut."""
    try:
        value = json.loads(arguments).get(INPUT)
    except (ValueError, AttributeError, RecursionError):
        return arguments
    return value if isinstance(value, str) else arguments


class ChatAnswer(Answer):
    """The answer of a chat request, with tool calls."""

    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    continues_prompt = False

    def __init__(self, start: ChatStart) -> None:
        body = start.body
        self.continues_prompt = body.continue_final_message
        super().__init__(start.id, start.requests, start.context, body)
        (self._request,) = start.requests
        self._prompt_logprobs: list[dict[int, Any] | None] | None = None
        self._has_prompt_logprobs = body.prompt_logprobs is not None
        count = self._request.sampling.n
        self._choices = [_ChatChoice(start.new_parser(), start.custom, body.include_reasoning) for _ in range(count)]

    def add_to_choice(self, index: int, output: StepOutput) -> dict[str, Any] | None:
        choice = self._choices[index]
        choice.token_ids += output.tokens
        if self._has_prompt_logprobs and output.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs(output.prompt_logprobs, self._tokenizer)
        delta = choice.add(output)
        logprobs = None
        if output.logprobs is not None:
            items = chat_logprobs(output.logprobs, self._tokenizer)
            choice.logprobs += items
            logprobs = {"content": items}
        has_ids = self._has_token_ids and bool(output.tokens)
        if not delta and logprobs is None and choice.finish_reason is None and not has_ids:
            return None
        chunk = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        return {**chunk, "token_ids": output.tokens} if self._has_token_ids else chunk

    def root_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._has_token_ids:
            fields["prompt_token_ids"] = self._request.prompt_ids
        if self._has_prompt_logprobs:
            fields["prompt_logprobs"] = self._prompt_logprobs
        return fields

    def choices(self) -> list[dict[str, Any]]:
        return [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": {"content": choice.logprobs} if choice.logprobs else None,
                "finish_reason": choice.finish_reason,
                **({"token_ids": choice.token_ids} if self._has_token_ids else {}),
            }
            for index, choice in enumerate(self._choices)
        ]


def chat_logprobs(tokens: Iterable[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The items of `logprobs.content`."""

    def item(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": list(data),
        }

    return [
        {**item(entry.token, entry.logprob), "top_logprobs": [item(*other) for other in entry.top]} for entry in tokens
    ]
