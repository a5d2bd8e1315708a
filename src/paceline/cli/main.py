"""The entry point `paceline`. A missing package becomes an error with its install command.

The Typer application with all commands.

The Typer application without its commands, and how errors of commands are printed.
"""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.cli import console
from paceline.cli.advise import advise_command
from paceline.cli.api_keys import api_keys
from paceline.cli.audit import audit
from paceline.cli.bench import EPILOG, bench, inflate
from paceline.cli.chat import chat, generate
from paceline.cli.cluster import down, keys, up
from paceline.cli.doctor import doctor
from paceline.cli.draft_swap import draft
from paceline.cli.live import apply, drain, rollout, scale
from paceline.cli.options import default_to
from paceline.cli.orchestrate import orchestrate
from paceline.cli.planner import plan_command, planner_command
from paceline.cli.profile import profile_command
from paceline.cli.serve import serve, warm
from paceline.cli.simulate import simulate_command
from paceline.cli.status import status
from paceline.cli.train import export, learn, train
from paceline.core.errors import MissingDependency, PacelineError
from paceline.core.version import VERSION


def app() -> None:
    try:
        cli = _application(sys.argv[1:])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.exit(f"error: the command line needs the package `{error.name}`: pip install 'paceline[server]'")
    cli()


def _application(arguments: list[str]) -> "typer.Typer":
    """The application that these arguments need. To import all commands would delay the start of a server by half a second."""
    if arguments[:1] == ["serve"]:
        from paceline.cli.serve import serve

        cli = application()
        cli.command()(serve)
        return cli

    return cli


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


def application() -> typer.Typer:
    """An application with the options of all commands."""
    cli = typer.Typer(
        cls=_Commands,
        rich_markup_mode="markdown",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    cli.callback()(paceline)
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


MEASURE = "measure"
cli = application()
for command in (
    serve, chat, generate, orchestrate, doctor, warm, train, export, up, down, status, apply, scale, drain, rollout, keys,
):  # fmt: skip
    cli.command()(command)
cli.command("advise")(advise_command)
cli.command("planner")(planner_command)
cli.command("profile")(profile_command)
cli.command("simulate")(simulate_command)
cli.command("plan")(plan_command)
benches = typer.Typer(cls=default_to(MEASURE), rich_markup_mode="markdown")
benches.command(MEASURE, epilog=EPILOG)(bench)
benches.command()(inflate)
cli.add_typer(benches, name="bench", help="Measure the speed of speculation, and check that the text is the same.")
cli.add_typer(api_keys, name="api-keys", help="Manage the API keys of a server: scopes and rate limits.")
cli.add_typer(draft, name="draft")
cli.add_typer(learn, name="learn")
cli.add_typer(audit, name="audit")
