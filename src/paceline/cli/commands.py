"""The Typer application with all commands."""

import typer

from paceline.cli.advise import advise_command
from paceline.cli.api_keys import api_keys
from paceline.cli.application import application
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
