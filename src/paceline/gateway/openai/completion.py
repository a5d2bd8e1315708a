"""Responses and chunks of /v1/completions, and responses of /v1/verify."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.core.output import StepOutput, TokenLogprobs
from paceline.core.request import Request
from paceline.core.sequence import FinishReason
from paceline.gateway.api.completion_bodies import CompletionBody, VerifyBody
from paceline.gateway.openai.answer import MIN_LOGPROB, Answer, AnswerContext, prompt_logprobs
from paceline.model_files.tokenizer import Tokenizer


@dataclass(slots=True)
class _TextChoice:
    """The text of one choice, as far as it is generated."""

    request: Request
    prompt: str
    """Prompt as text, for `echo`."""
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | int] = field(default_factory=list)
    """A token id alone stands for the first prompt token, which has no log-probability."""
    offset: int = 0
    """Position of the next token in the text."""
    is_started: bool = False
    finish_reason: str | None = None


class CompletionAnswer(Answer):
    """The answer of a text completion request."""

    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self, answer_id: str, requests: Sequence[Request], context: AnswerContext, body: CompletionBody
    ) -> None:
        super().__init__(answer_id, requests, context, body)
        self._body = body
        texts = [
            prompt if isinstance(prompt, str) else context.tokenizer.decode(prompt, skip_special=False)
            for prompt in (body.prompts if body.echo else [""] * len(requests))
        ]
        self._choices = [
            _TextChoice(request, text)
            for request, text in zip(requests, texts, strict=True)
            for _ in range(request.sampling.n)
        ]
        self._prompt_scores: dict[str, tuple[TokenLogprobs, ...]] = {}

    def add(self, output: StepOutput) -> dict[str, Any] | None:
        if self._body.max_tokens == 0:  # the engine generates one token at least
            output = replace(
                output,
                tokens=(),
                origins=(),
                text="",
                logprobs=None if output.logprobs is None else (),
                finish_reason=FinishReason.LENGTH if output.finish_reason else None,
            )
        return super().add(output)

    def add_to_choice(self, index: int, output: StepOutput) -> dict[str, Any] | None:
        choice, body, logprobs = self._choices[index], self._body, None
        if output.prompt_logprobs is not None:
            self._prompt_scores[output.request_id] = output.prompt_logprobs
        text, tokens = output.text, output.tokens
        scores: list[TokenLogprobs | int] = list(output.logprobs or ())
        is_first, choice.is_started = not choice.is_started, True
        if is_first and body.echo:
            text = choice.prompt + text
            if body.logprobs is not None:
                prompt_scores = self._prompt_scores.get(output.request_id, ())
                scores = [choice.request.prompt_ids[0], *prompt_scores, *scores]
        choice.texts.append(text)
        choice.token_ids += tokens
        choice.finish_reason = output.finish_reason.value if output.finish_reason else None
        if output.logprobs is not None:
            logprobs = completion_logprobs(
                scores, self._tokenizer, choice.offset, body.logprobs, body.return_tokens_as_token_ids
            )
            choice.offset += sum(len(_text(self._tokenizer, entry)) for entry in scores)
            choice.logprobs += scores
        has_ids = body.return_token_ids and bool(tokens)
        if not text and logprobs is None and choice.finish_reason is None and not has_ids:
            return None
        chunk = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        if body.return_token_ids:
            chunk["prompt_token_ids"] = choice.request.prompt_ids if is_first else None
            chunk["token_ids"] = tokens
        return chunk

    def choices(self) -> list[dict[str, Any]]:
        return [self._choice(index, choice) for index, choice in enumerate(self._choices)]

    def _choice(self, index: int, choice: _TextChoice) -> dict[str, Any]:
        body, tokenizer = self._body, self._tokenizer
        values = {
            "index": index,
            "text": "".join(choice.texts),
            "logprobs": completion_logprobs(
                choice.logprobs, tokenizer, 0, body.logprobs, body.return_tokens_as_token_ids
            )
            if choice.logprobs
            else None,
            "finish_reason": choice.finish_reason,
        }
        if body.prompt_logprobs is not None:
            scores = self._prompt_scores.get(choice.request.id, ())
            values["prompt_logprobs"] = prompt_logprobs(scores, tokenizer, body.prompt_logprobs)
        if body.return_token_ids:
            values["prompt_token_ids"] = choice.request.prompt_ids
            values["token_ids"] = choice.token_ids
        return values


def completion_logprobs(
    tokens: Sequence[TokenLogprobs | int],
    tokenizer: Tokenizer,
    offset: int,
    top_n: int | None = None,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Returns the parallel lists of `logprobs` of a choice. `offset` is the position of the first token in the text. `top_n`
    limits the number of likeliest tokens. A token id alone has no log-probability. `as_ids` names tokens `token_id:123`."""

    def name_of(token: int) -> str:
        return f"token_id:{token}" if as_ids else _text(tokenizer, token)

    offsets = []
    for entry in tokens:
        offsets.append(offset)
        offset += len(_text(tokenizer, entry))
    scores = [None if isinstance(entry, int) else entry for entry in tokens]
    return {
        "tokens": [name_of(entry if isinstance(entry, int) else entry.token) for entry in tokens],
        "token_logprobs": [None if entry is None else max(entry.logprob, MIN_LOGPROB) for entry in scores],
        "top_logprobs": [
            None if entry is None else {name_of(token): max(value, MIN_LOGPROB) for token, value in entry.top[:top_n]}
            for entry in scores
        ],
        "text_offset": offsets,
    }


def _text(tokenizer: Tokenizer, entry: TokenLogprobs | int) -> str:
    token = entry if isinstance(entry, int) else entry.token
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


class VerifyAnswer(Answer):
    """The outcome of one round: committed tokens, and whether they end the text."""

    prefix, object, chunk_object = "verify-", "verify", "verify"

    def __init__(self, request: Request, context: AnswerContext, body: VerifyBody, max_model_len: int) -> None:
        super().__init__(request.id, [request], context, body)
        self._room = min(request.sampling.max_tokens, max_model_len - len(request.prompt_ids)) - len(body.output)
        self._tokens: list[int] = []
        self._accepted = 0
        self._finish_reason: str | None = None

    def add_to_choice(self, index: int, output: StepOutput) -> dict[str, Any] | None:
        self._tokens += output.tokens
        self._accepted += output.accepted
        if output.finish_reason is FinishReason.STOP or len(self._tokens) >= self._room:
            self._finish_reason = output.finish_reason.value if output.finish_reason else None
        return None

    def choices(self) -> list[dict[str, Any]]:
        return []

    def response(self) -> dict[str, Any]:
        return {
            **self._head,
            "tokens": self._tokens,
            "accepted": self._accepted,
            "finish_reason": self._finish_reason,
            "usage": self._usage.usage(),
        }
