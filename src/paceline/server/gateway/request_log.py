"""One log line per generation, written when it ends: key, tokens, times and the reason for the end.

The line has no prompt and no answer unless `log_requests` is `text`.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.models.tokenizer.tokenizer import Tokenizer
from paceline.server.openai.errors import to_api_error

logger = logging.getLogger(__name__)


class RequestLog:
    """Counts the outputs of one HTTP request and writes its log line."""

    def __init__(self, answer_id: str, key_name: str, requests: Sequence[Request], with_text: bool) -> None:
        self.error: BaseException | None = None
        """Error that ended the request."""
        self._id, self._key_name, self._requests = answer_id, key_name, requests
        self._started = time.monotonic()
        self._first_token: float | None = None
        self._tokens = self._drafted = self._accepted = 0
        self._finish_reasons: set[str] = set()
        self._text: dict[tuple[str, int], list[str]] | None = {} if with_text else None

    def add(self, outputs: Sequence[StepOutput], now: float) -> None:
        self._first_token = now if self._first_token is None else self._first_token
        for output in outputs:
            self._tokens += len(output.tokens)
            self._drafted += output.drafted
            self._accepted += output.accepted
            if output.finish_reason is not None:
                self._finish_reasons.add(output.finish_reason.value)
            if self._text is not None:
                self._text.setdefault((output.request_id, output.choice), []).append(output.text)

    def write(self, tokenizer: Tokenizer) -> None:
        fields: dict[str, Any] = {
            "request_id": self._id,
            "who": self._key_name,
            "category": self._requests[0].category,
            "prompt_tokens": sum(len(request.prompt_ids) for request in self._requests),
            "output_tokens": self._tokens,
            "drafted": self._drafted,
            "accepted": self._accepted,
            "seconds": round(time.monotonic() - self._started, 4),
            "reason": self._reason(),
        }
        if self._first_token is not None:
            fields["first_token_seconds"] = round(self._first_token - self._started, 4)
        if self._requests[0].trace:
            fields["trace_id"] = self._requests[0].trace.split("-")[1]
        if self._text is not None:
            # Special tokens separate the messages of a conversation
            fields["prompt"] = [tokenizer.decode(request.prompt_ids, skip_special=False) for request in self._requests]
            fields["answer"] = ["".join(text) for text in self._text.values()]
        logger.info("generated", extra=fields)

    def _reason(self) -> str:
        """The finish reasons of all choices, or the code of the error."""
        if self.error is None:
            return ", ".join(sorted(self._finish_reasons)) or "cancelled"
        if not isinstance(self.error, Exception):
            return "cancelled"
        error = to_api_error(self.error)
        return error.code or error.type
