"""Renders chat messages with a model's Jinja template, as Hugging Face does.

Templates are part of checkpoints and not trusted, so they run in an immutable sandbox with limits of steps, time and text.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from paceline.core.errors import InvalidRequest, MissingDependency, UnsupportedModel
from paceline.model_files.tokenizer.tokenizer import Tokenizer


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            from paceline.model_files.tokenizer.template_limits import LimitedEnvironment
        except ImportError:
            raise MissingDependency("jinja2", "rendering chat messages", "chat") from None
        environment = LimitedEnvironment(_to_json)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.compile_limited(source)
        except Exception as error:  # of Jinja, or of Python's compiler: nesting too deep
            raise UnsupportedModel(f"the model's chat template does not parse: {error!s:.300}") from None
        self._environment = environment
        self._special_tokens = dict(special_tokens)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ChatTemplate":
        if tokenizer.chat_template is None:
            raise InvalidRequest("this model has no chat template: send a plain prompt to /v1/completions", "messages")
        return cls(tokenizer.chat_template, tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`. Encode it with `add_special=False`: it contains its special tokens. `variables` are
        further variables of the template, such as `enable_thinking`."""
        try:
            return self._environment.render(
                self._template,
                {
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                },
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise InvalidRequest(f"the chat template rejects these messages: {error!s:.300}", "messages") from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON without the HTML escapes of Jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
