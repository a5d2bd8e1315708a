"""`paceline profile`: what one worker costs, measured on this machine."""

import logging
import math
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console
from paceline.cli.console import describe_seconds, loaded
from paceline.cli.options import ENGINE, check_folders, with_settings
from paceline.core.clock import WallClock
from paceline.gateway.config import ServerConfig
from paceline.planning import save_profile
from paceline.tools.inflate import calibration_config
from paceline.tools.profile import DEPTH, MeasurementProgress, Prices, measure_profile


@contextmanager
def _without_drift_warnings() -> Iterator[None]:
    """Prompts are random, so a change of the acceptance between two batches means nothing."""
    logger = logging.getLogger("paceline.engine.traffic")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@with_settings(ENGINE)
def profile_command(
    config: ServerConfig,
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="The profile to write.")],
    name: Annotated[str | None, typer.Option(help="Name of the profile. Default: that of the file.")] = None,
    price: Annotated[float, typer.Option(min=0.0, help="Dollars per hour of a target worker.")] = 0.0,
    draft_price: Annotated[float, typer.Option(min=0.0, help="Dollars per hour of a draft worker.")] = 0.0,
    round_trip_us: Annotated[float, typer.Option(min=0.0, help="Round trip to a draft worker.")] = 100.0,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.0, help="Time after which no further batch size is measured. Default: no limit."),
    ] = None,
) -> None:
    """Measure a worker once: steps by batch, passes by rows, contexts, prompts, drafts, KV cache and start-up.

    `paceline simulate` and `paceline plan` read the file with --profile. Prices, links and the network are not measured. On a
    CPU it takes a minute or two; the time left is shown, and --seconds limits it.
    """
    check_folders(file)
    clock = WallClock()
    began = clock.now()
    with _without_drift_warnings(), loaded(calibration_config(config.engine, DEPTH)) as llm:
        with console.err.status("warming up"):
            llm.warm_up()
            started = clock.now() - began
            llm.finish_idle_work()
        prices = Prices(price, draft_price, round_trip_us / 1e6)
        with console.share_bar() as bar:
            task = bar.add_task("measuring", total=1.0, left="")

            def show(progress: MeasurementProgress) -> None:
                left = f"about {describe_seconds(progress.seconds_left)} left"
                bar.update(task, description=f"measuring: {progress.part}", completed=progress.done, left=left)
                if not console.err.is_terminal:  # a bar shows nothing in a log
                    text = f"{clock.now() - began:6.1f} s  measuring: {progress.part}, {left}"
                    console.err.print(text, markup=False, highlight=False)

            profile = measure_profile(
                llm,
                name or file.stem,
                started,
                prices,
                clock,
                show,
                math.inf if seconds is None else seconds,
                f"paceline {shlex.join(sys.argv[1:])}",
            )
    save_profile(replace(profile, name=name or file.stem), file)
    curves = {"step by rows": profile.pass_seconds, "prompts by rows": profile.prompt_seconds}
    for title, curve in {**curves, "draft step by sequences": profile.draft_seconds}.items():
        points = (
            ", ".join(f"{count}: {1000.0 * seconds:.2f}" for count, seconds in curve.points) if curve else "as steps"
        )
        console.out.print(f"{title}, ms: {points}", markup=False)
    console.out.print(f"wrote {file} in {clock.now() - began:.0f} s", markup=False)
