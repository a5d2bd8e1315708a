"""The checks of a client library, which a program registers and runs: `PROGRAM URL MODEL KIND…`. It prints one JSON object: the
error of each check by its name, which is empty if the check passed. It needs the standard library alone.

The kinds say what a check asks of the model: `text` any text, `schema` a text of a given form, which the server guarantees,
`tools` the call of a tool and an answer with its result.
"""

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

URL, MODEL = sys.argv[1], sys.argv[2]
QUESTION = "What is the capital of France? Answer in one sentence."
WEATHER_QUESTION = "What is the weather in Rome now? Use the tool get_weather, then tell me."
CITY_QUESTION = "Name a large city of Italy, and its country."
WEATHER = "sunny, 17 degrees"
TOKENS = 64

LOOPS = ("GraphRecursionError", "UsageLimitExceeded", "WorkflowRuntimeError")
"""Errors of libraries whose loop the model does not end."""

_checks: list[tuple[str, str, Callable[[], Any]]] = []


class ModelFault(Exception):
    """The protocol worked; the model did not do what it was asked for."""


def check(kind: str, name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers a check, which is a function or a coroutine function without arguments."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        _checks.append((kind, name, function))
        return function

    return register


def same_text(*texts: str | None) -> None:
    """Greedy answers to one question are equal, streamed or not."""
    assert texts[0], "the answer is empty"
    assert len(set(texts)) == 1, f"the texts differ: {texts}"


def get_weather(city: str) -> str:
    """The weather in a city now."""
    return f"{WEATHER} in {city}"


def called(names: list[str], arguments: Any = None) -> None:
    """The model has called the tool, with these arguments of its first call."""
    if not names:
        raise ModelFault("the model answers without a call")
    if set(names) != {"get_weather"}:
        raise ModelFault(f"the model calls {', '.join(names)}")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if arguments is not None and "rome" not in str(arguments.get("city", "")).lower():
        raise ModelFault(f"the model calls with {json.dumps(arguments)}")


def told(text: str | None) -> None:
    """The answer has the tool's result."""
    if not text:
        raise ModelFault("the model calls the tool again in place of an answer")
    if "17" not in text:
        raise ModelFault(f"the model does not use the result: {text[:80]!r}")


def is_city(city: Any, country: Any) -> None:
    assert isinstance(city, str)
    assert isinstance(country, str)


def main() -> None:
    """Runs the checks of the kinds that the arguments name."""
    found = {}
    for kind, name, function in _checks:
        if kind in sys.argv[3:]:
            found[name] = _error_of(function)
    print(json.dumps(found))


def _error_of(function: Callable[[], Any]) -> str:
    try:
        result = function()
        if inspect.iscoroutine(result):
            asyncio.run(result)
    except Exception as error:
        if type(error).__name__ in LOOPS:
            return "ModelFault: the model calls the tool again and again"
        if not isinstance(error, ModelFault):
            traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:400]
    return ""
