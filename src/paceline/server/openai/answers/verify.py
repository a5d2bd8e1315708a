"""Responses of /v1/verify."""

from typing import Any

from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.core.sequence import FinishReason
from paceline.server.openai.answers.answer import Answer, AnswerContext
from paceline.server.openai.schemas.verify import VerifyBody


class VerifyAnswer(Answer):
    """The outcome of one round: committed tokens, and whether they end the text."""

    prefix, object, chunk_object = "verify", "verify", "verify"

    def __init__(self, request: Request, context: AnswerContext, body: VerifyBody, max_model_len: int) -> None:
        super().__init__([request], context, body)
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
