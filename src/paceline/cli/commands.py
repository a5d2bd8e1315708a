"""The Typer application: all commands, and how their errors are printed."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.cli.advise import advise_command
from paceline.cli.api_keys import api_keys
from paceline.cli.audit import audit
from paceline.cli.bench import EPILOG, bench, inflate
from paceline.cli.chat import chat
from paceline.cli.cluster import down, keys, up
from paceline.cli.doctor.command import doctor
from paceline.cli.generate import generate
from paceline.cli.live.apply import apply
from paceline.cli.live.draft_swap import draft
from paceline.cli.live.rollout import rollout
from paceline.cli.live.scale import drain, scale
from paceline.cli.options import default_to
from paceline.cli.orchestrate import orchestrate
from paceline.cli.planning.plan import plan_command
from paceline.cli.planning.planner import planner_command
from paceline.cli.planning.profile import profile_command
from paceline.cli.planning.simulate import simulate_command
from paceline.cli.render import console
from paceline.cli.serve import serve
from paceline.cli.status import status
from paceline.cli.training.learn import learn
from paceline.cli.training.train import export, train
from paceline.cli.warm import warm
from paceline.core.errors import MissingDependency, PacelineError
from paceline.core.version import VERSION


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

    def _invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name not in ("zmq", "msgspec"):  # imported by up, status and down when they run
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


def _print_version(wanted: bool) -> None:
    if wanted:
        console.out.print(f"paceline {VERSION}")
        raise typer.Exit


@cli.callback()
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
