"""The Typer application: which commands there are, and what happens to their errors."""

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.cli import console
from paceline.cli.advise import advise_command
from paceline.cli.api_keys import api_keys
from paceline.cli.audit import audit
from paceline.cli.bench import EPILOG, bench
from paceline.cli.bench_inflate import inflate
from paceline.cli.chat import chat
from paceline.cli.default_command import falls_back_to
from paceline.cli.doctor import doctor
from paceline.cli.down import down
from paceline.cli.generate import generate
from paceline.cli.keys import keys
from paceline.cli.serve import serve
from paceline.cli.status import status
from paceline.cli.train import train
from paceline.cli.up import up
from paceline.core.errors import MissingDependency, PacelineError


class _Commands(TyperGroup):
    """An error made on purpose is one line and status 2; everything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:  # click's context, whichever click Typer brings
        try:
            return self._invoke(ctx)
        except PacelineError as error:
            if ctx.params["debug"]:
                raise
            console.fail(str(error))
            raise typer.Exit(2) from None

    def _invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name not in ("zmq", "msgspec"):  # what up, status and down import when they run
                raise
            raise MissingDependency(error.name, "a cluster", "pool") from error


MEASURE = "measure"
cli = typer.Typer(
    cls=_Commands,
    rich_markup_mode="markdown",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (serve, chat, generate, doctor, train, up, down, status, keys):
    cli.command()(command)
cli.command("advise")(advise_command)
benches = typer.Typer(cls=falls_back_to(MEASURE), rich_markup_mode="markdown")
benches.command(MEASURE, epilog=EPILOG)(bench)
benches.command()(inflate)
cli.add_typer(benches, name="bench", help="Measure what speculation brings, and that the text stays the same.")
cli.add_typer(api_keys, name="api-keys", help="Say who may use a server, and how much of it.")
cli.add_typer(audit, name="audit")


def _print_version(wanted: bool) -> None:
    if wanted:
        console.out.print(f"paceline {version('paceline')}")
        raise typer.Exit


@cli.callback()
def paceline(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Speculative decoding for LLM serving: faster, and not a word different.

    A draft guesses the next tokens, the model checks all of them in one pass and keeps those it agrees with. The text is
    exactly the model's own. Without --model every command uses smollm2, the embedded model.
    """
