"""A Jinja environment for templates that are not trusted: a sandbox with limits of steps, time and text.

A step is an iteration of a loop, a call, a filter, or 256 characters of text made by one of them. Import this module where
Jinja is needed: the package is optional.
"""

import functools
import re
import time
from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from typing import Any, cast

from jinja2 import TemplateError, nodes, pass_context
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SOURCE = 1 << 18
"""Characters of a template."""
MAX_STEPS = 200_000
MAX_SECONDS = 2.0
MAX_TEXT = 1 << 24
"""Characters of a text that a template makes."""
_MAX_NUMBER = 1 << 20
"""Largest whole number that a call may get: methods such as `ljust` make that many characters."""
_WIDE_FIELD = re.compile(r"\d{5,}|%[^a-z%]*\*")
_MAX_INDENT = 64
"""Largest indentation of JSON."""
_REMOVED = ("groupby", "pprint", "urlize", "wordwrap", "xmlattr")
"""Filters that make HTML, debugging text or groups: no prompt needs them, and their cost has no simple bound."""
_CHARACTERS_PER_STEP = 256


class TemplateLimit(TemplateError):
    """The template makes too many steps, or too much text."""


class _Budget:
    """The steps and the time that one rendering has left."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._steps, self._clock, self._deadline = MAX_STEPS, clock, clock() + MAX_SECONDS

    def spend(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise TemplateLimit(f"it takes more than {MAX_STEPS} steps")
        if self._clock() > self._deadline:
            raise TemplateLimit(f"it takes more than {MAX_SECONDS:g} seconds")


_budget: ContextVar[_Budget] = ContextVar("template_budget")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Call `render` of this class in place of the template's own method: it sets the limits of one rendering."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, to_json: Callable[..., str], clock: Callable[[], float] = time.monotonic) -> None:
        # NOTE: no constant folding, which would run expressions while the template is compiled, outside the limits.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], optimized=False, finalize=_finalize
        )
        self._clock = clock
        filters = {name: function for name, function in self.filters.items() if name not in _REMOVED} | {
            "tojson": to_json
        }
        del self.globals["lipsum"]
        self.filters = {name: _limited(name, function) for name, function in filters.items()}

    def compile_limited(self, source: str) -> Any:
        """The template, with a step counted in every iteration of its loops."""
        if len(source) > MAX_SOURCE:
            raise TemplateLimit(f"it has {len(source)} characters; at most {MAX_SOURCE}")
        tree = self.parse(source)
        for block in tree.find_all(nodes.For):
            literals = sum(len(text.data) for text in block.find_all(nodes.TemplateData))
            steps = nodes.Const(1 + literals // _CHARACTERS_PER_STEP)
            block.body.insert(0, nodes.ExprStmt(_call("spend", [steps])))
            block.iter = _call("sized", [cast(nodes.Expr, block.iter)])
        for parent in list(tree.find_all(nodes.Node)):
            _replace_concats(parent)
        return self.from_string(tree)

    def render(self, template: Any, variables: dict[str, Any]) -> str:
        token = _budget.set(_Budget(self._clock))
        try:
            return template.render(variables)
        finally:
            _budget.reset(token)

    def spend(self, steps: int, **_: Any) -> None:
        _budget.get().spend(steps)

    def sized(self, items: Any, **_: Any) -> Any:
        """`items`, of which a condition of the loop may read all without an iteration."""
        if hasattr(items, "__len__"):
            _budget.get().spend(len(items) // 8)
        return items

    def concat_texts(self, *parts: Any, **_: Any) -> str:
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return _charged("".join(texts))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # as in Jinja
        _budget.get().spend(1)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps `str.format`
        if isinstance(owner, LimitedEnvironment):
            return super().call(__context, __obj, *args, **kwargs)
        _check_numbers((*args, *kwargs.values()))
        if isinstance(owner, str):
            _check_method(owner, __obj.__name__, args, kwargs)
        return _charged(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(repeated, str | list | tuple) and isinstance(times, int):
                    _check_size(len(repeated) * times)
        elif operator == "**":
            _check_numbers((left, right))
            if isinstance(right, int) and abs(right) > 64:
                raise TemplateLimit("it computes a large power")
        elif operator == "%" and isinstance(left, str):
            _check_format(left, list(right) if isinstance(right, tuple) else [right])
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size(len(left) + len(right))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > 4096:
            raise TemplateLimit("it computes a large number")
        return _charged(result)


def _call(method: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


def _replace_concats(parent: nodes.Node) -> None:
    """`a ~ b` becomes a call, because no operator of the sandbox intercepts it."""
    for name, value in parent.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(parent, name, _call("concat_texts", value.nodes))
        elif isinstance(value, list):
            value[:] = [_call("concat_texts", node.nodes) if isinstance(node, nodes.Concat) else node for node in value]


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Charges for the value of every `{{ }}`. Jinja calls it once for each, and never at compile time."""
    return _charged(value)


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps Jinja's marks of what a filter gets first
    def limited(*args: Any, **kwargs: Any) -> Any:
        _budget.get().spend(1)
        _check_numbers((*args, *kwargs.values()))
        given = [arg for arg in args if not isinstance(arg, Context)]
        texts = [value for value in (*given, *kwargs.values()) if isinstance(value, str)]
        if name in ("replace", "join", "indent", "wordwrap", "format") and len(texts) > 1:
            lengths = sorted(map(len, texts))
            _check_size(lengths[-1] * max(1, lengths[-2]))
        if name == "join":
            _check_join(given, kwargs)
        if name == "indent" and texts:
            _check_lines(texts[0], [*given[1:], *kwargs.values()])
        if name == "tojson" and any(_is_number(value, _MAX_INDENT) for value in (*given[1:], *kwargs.values())):
            raise TemplateLimit(f"it indents JSON by more than {_MAX_INDENT}")
        if name == "format" and texts:
            _check_format(texts[0], [*given[1:], *kwargs.values()])
        if name == "sum" and any(isinstance(value, list | tuple) for value in (*given[1:], *kwargs.values())):
            raise TemplateLimit("it adds lists with `sum`")
        return _charged(function(*args, **kwargs))

    return limited


def _check_join(given: list[Any], kwargs: dict[str, Any]) -> None:
    sized = [value for value in given if isinstance(value, list | tuple)]
    separators = [value for value in (*given, *kwargs.values()) if isinstance(value, str)]
    for items in sized:
        _check_size(sum(len(str(item)) for item in items) + len(items) * max(map(len, separators), default=0))


def _check_lines(text: str, values: list[Any]) -> None:
    """Refuses an indentation that makes a text much larger."""
    width = max(
        (len(value) if isinstance(value, str) else abs(value) for value in values if isinstance(value, str | int)),
        default=4,
    )
    _check_size(len(text) + (len(text.splitlines()) + 1) * width)


def _is_number(value: Any, most: int) -> bool:
    """Whether this is a number over `most`, or a text of so many characters."""
    return (isinstance(value, int) and value > most) or (isinstance(value, str) and len(value) > most)


def _check_method(owner: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses methods of a string whose result is much larger than their arguments."""
    if method == "replace" and len(args) > 1 and all(isinstance(argument, str) for argument in args[:2]):
        _check_size(len(owner) + owner.count(args[0]) * len(args[1]))
    elif method == "join" and args and isinstance(args[0], Collection):
        _check_size(sum(len(str(item)) for item in args[0]) + len(args[0]) * len(owner))
    elif method in ("format", "format_map"):
        _check_format(owner, [*args, *kwargs.values()])
    elif method == "expandtabs":
        widths = [value for value in (*args, *kwargs.values()) if isinstance(value, int)]
        _check_size(len(owner) + owner.count("\t") * max(map(abs, widths), default=8))
    elif method == "translate":
        raise TemplateLimit("it calls `translate`")


def _check_format(text: str, values: list[Any]) -> None:
    if _WIDE_FIELD.search(text):
        raise TemplateLimit("it formats a field of more than 9,999 characters")
    fields = text.count("{") + text.count("%")
    _check_size(fields * max((len(str(value)) for value in values), default=0))


def _check_numbers(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_NUMBER for value in values):
        raise TemplateLimit(f"it calls a function with a number over {_MAX_NUMBER}")


def _check_size(size: int) -> None:
    if size > MAX_TEXT:
        raise TemplateLimit(f"it makes a text of {size} characters; at most {MAX_TEXT}")


def _charged(value: Any) -> Any:
    """`value`, after its size was spent."""
    if isinstance(value, str | list | tuple | dict):
        _budget.get().spend(1 + len(value) // _CHARACTERS_PER_STEP)
    return value
