"""Groups of commands that are a command themselves."""

from typing import Any

from typer.core import TyperGroup


def falls_back_to(name: str) -> type[TyperGroup]:
    """A group that runs the command `name` unless the first word names another."""

    class Group(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # click's context, whichever click Typer brings
            return super().parse_args(ctx, args if args and args[0] in self.commands else [name, *args])

    return Group
