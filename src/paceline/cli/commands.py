"""The Typer application with all commands."""

import typer

from paceline.cli.advise.command import advise_command
from paceline.cli.api_keys import api_keys
from paceline.cli.application import application
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
from paceline.cli.serve import serve
from paceline.cli.status import status
from paceline.cli.training.learn import learn
from paceline.cli.training.train import export, train
from paceline.cli.warm import warm

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
