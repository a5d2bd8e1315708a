"""`paceline draft swap`: a new draft for a pool, tried on a share of the traffic."""

import time
from typing import Annotated

import typer

from paceline.cli.cluster import Ray, cluster_of
from paceline.cli.live.running import FILE, Config, RunningCluster, Wait, finish
from paceline.cli.render import console

draft = typer.Typer(no_args_is_help=True)
PAUSE = 0.25


@draft.callback()
def group() -> None:
    """Change the drafts of a running cluster."""


@draft.command()
def swap(
    pool: Annotated[str, typer.Argument(help="A draft pool of the cluster.")],
    model: Annotated[str, typer.Argument(metavar="FOLDER", help="The new draft, as `model` of the pool.")],
    config: Config = FILE,
    seconds: Annotated[float, typer.Option(min=1, help="Longest time of the trial under load.")] = 600.0,
    wait: Wait = 600.0,
    ray: Ray = None,
) -> None:
    """Try a new draft under load, keep it if its goodput is higher with confidence, and roll back if it is not.

    Workers with the new draft start beside the others and get a quarter of the sequences. The text does not change. Ctrl-C
    rolls back. Exit status 1: the old draft stays.
    """
    settings = cluster_of(config, ray)
    with RunningCluster(settings) as (pools, gateway):
        from paceline.cli.doctor.cluster_checks import require_sound
        from paceline.cluster.pairing.draft_trial import TrialLimits, TrialVerdict
        from paceline.runtime.deploy.draft_swap import DraftSwap, with_draft

        require_sound(with_draft(pools.desired().config, pool, model))
        run = DraftSwap(pools, gateway, pool, model, TrialLimits(seconds=seconds))
        with console.err.status("the new draft loads") as status:

            def pause() -> bool:
                time.sleep(PAUSE)
                return True

            decision = run.run(pause, wait, lambda text: status.update(text))
        is_kept = decision.verdict is TrialVerdict.KEEP
        finish(gateway, pools, wait)
    if is_kept:
        console.out.print(
            f"{pool} drafts with {model}: {decision.reason}; set `model: {model}` of the pool in {config}", markup=False
        )
    else:
        console.out.print(f"{pool} keeps its draft: {decision.reason}", markup=False)
        raise typer.Exit(1)
