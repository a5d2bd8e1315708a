"""The fields of a plan as command-line options."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from types import GenericAlias
from typing import Annotated, Any, get_args, get_type_hints

import typer


def add_plan(plan: type, arguments: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per field of a dataclass, whose annotations are help texts; `arguments` are positional."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = _parameters(plan, arguments)
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _parameters(plan: Any, arguments: Sequence[str]) -> list[inspect.Parameter]:
    hints = get_type_hints(plan, include_extras=True)
    parameters = []
    for entry in fields(plan):
        hint, message = get_args(hints[entry.name])
        default = inspect.Parameter.empty if entry.default is MISSING else entry.default
        many = default == ()
        how = typer.Argument(help=message) if entry.name in arguments else typer.Option(help=message)
        parameters.append(
            inspect.Parameter(
                entry.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=[] if many else default,
                annotation=Annotated[GenericAlias(list, get_args(hint)[:1]) if many else hint, how],
            )
        )
    return parameters
