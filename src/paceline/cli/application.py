"""The commands by name, the Typer application with those that are needed, and how errors of commands are printed.

The module of a command is imported only if the application has the command: importing all of them takes seconds.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.cli import console
from paceline.core.errors import MissingDependency, PacelineError
from paceline.core.version import VERSION

COMMANDS: Mapping[str, str] = {
    "run": "run.run",
    "chat": "run.run",
    "serve": "serve.serve",
    "pull": "models.pull_command",
    "list": "models.list_command",
    "ps": "models.ps",
    "stop": "models.stop",
    "rm": "models.rm",
    "generate": "generate.generate",
    "orchestrate": "orchestrate.orchestrate",
    "doctor": "doctor.doctor",
    "warm": "serve.warm",
    "train": "train.train",
    "export": "train.export",
    "up": "cluster.up",
    "down": "cluster.down",
    "status": "status.status",
    "apply": "live.apply",
    "scale": "live.scale",
    "drain": "live.drain",
    "rollout": "live.rollout",
    "keys": "cluster.keys",
    "advise": "advise.advise_command",
    "planner": "planner.planner_command",
    "profile": "profile.profile_command",
    "simulate": "simulate.simulate_command",
    "plan": "planner.plan_command",
    "bench": "bench.benches",
    "api-keys": "api_keys.api_keys",
    "draft": "draft_swap.draft",
    "learn": "train.learn",
    "audit": "audit.audit",
}
"""The module and the function, or the Typer application, of each command, in the order of the help."""


class _Commands(TyperGroup):
    """Prints a PacelineError as one line with exit status 2. Any other exception keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:  # click's context
        try:
            return self._invoke(ctx)
        except PacelineError as error:
            if ctx.params["debug"]:
                raise
            console.fail(str(error))
            raise typer.Exit(2) from None

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flag_values(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _hide_flag_values(command, ctx)
        return command

    def _invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name not in ("zmq", "msgspec"):  # imported by up, status and down when they run
                raise
            raise MissingDependency(error.name, "a cluster", "pool") from error


def _hide_flag_values(command: Any, ctx: Any) -> None:
    """The help of a command and of its commands shows no type next to a flag, which takes no value."""
    _without_flag_values(command.get_params(ctx))
    for subcommand in getattr(command, "commands", {}).values():
        _hide_flag_values(subcommand, ctx)


def _without_flag_values(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def application(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The application with the commands of these names."""
    cli = typer.Typer(
        cls=_Commands,
        rich_markup_mode="markdown",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    cli.callback()(paceline)
    for name in names:
        module, _, attribute = COMMANDS[name].partition(".")
        command = getattr(import_module(f"paceline.cli.{module}"), attribute)
        if isinstance(command, typer.Typer):
            cli.add_typer(command, name=name)
        else:
            cli.command(name)(command)
    return cli


def _print_version(wanted: bool) -> None:
    if wanted:
        console.out.print(f"paceline {VERSION}")
        raise typer.Exit


def paceline(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Speculative decoding for LLM serving: faster, and not a word different.

    A draft proposes tokens, and the model verifies all of them in one pass. The text is exactly the text of plain decoding.
    Without --model every command uses smollm2, the embedded model.
    """
