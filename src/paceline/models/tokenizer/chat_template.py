"""Renders chat messages with a model's Jinja template, as Hugging Face does.

Templates are part of checkpoints and not trusted, so they run in an immutable sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from paceline.core.errors import InvalidRequest, MissingDependency, UnsupportedModel
from paceline.models.tokenizer.tokenizer import Tokenizer


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            from jinja2 import TemplateSyntaxError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise MissingDependency("jinja2", "rendering chat messages", "chat") from None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise UnsupportedModel(f"the model's chat template does not parse: {error}") from None
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
    ) -> str:
        """The prompt for `messages`. Encode it with `add_special=False`: it contains its special tokens."""
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except (TemplateError, TypeError, KeyError, AttributeError) as error:
            raise InvalidRequest(f"the chat template rejects these messages: {error}", "messages") from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON without the HTML escapes of Jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
