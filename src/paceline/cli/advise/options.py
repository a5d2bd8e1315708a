"""The options of `paceline advise`."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.core.speculation import MAX_DEPTH

GIVEN = "Given figures, in place of a calibration run"

Prompts = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE", help="Prompts to calibrate with: lines of JSON, as for `bench`. Default: a built-in set."
    ),
]
MaxDepth = Annotated[int, typer.Option(min=1, max=MAX_DEPTH, help="Largest depth to consider.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences that decode together.")]
Tokens = Annotated[int, typer.Option(min=8, help="Tokens of a calibration answer.")]
Temperature = Annotated[float, typer.Option(help="Temperature of the calibration; 0 is greedy.")]
Methods = Annotated[str | None, typer.Option(metavar="NAME[,NAME…]", help="Methods to calibrate.", show_default="all")]
Limit = Annotated[int, typer.Option(min=1, help="Most prompts, taken from all categories in turn.")]
Price = Annotated[float | None, typer.Option(min=0.0, help="Dollars per hour of the target's devices.")]

DraftPrice = Annotated[
    float,
    typer.Option(min=0.0, help="Dollars per hour of a pool of draft workers; compares it with a local draft model."),
]
NetworkMs = Annotated[
    float, typer.Option(min=0.0, help="Network round trip to a pool; compares it with a local draft model.")
]
PoolDraftMs = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Time of one drafted token in a pool, such as idle cores; compares it with a local draft model.",
    ),
]
PoolReady = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Share of rounds whose draft a pool has ready: it drafts ahead.")
]

Alpha = Annotated[
    str | None,
    typer.Option(
        metavar="NUM[,NUM…]", help="Conditional acceptance: one value, or one per position.", rich_help_panel=GIVEN
    ),
]
DraftMs = Annotated[float | None, typer.Option(min=0.0, help="Time of one drafted token.", rich_help_panel=GIVEN)]
VerifyMs = Annotated[
    float | None, typer.Option(min=0.0, help="Time of a target pass over all drafts.", rich_help_panel=GIVEN)
]
PlainMs = Annotated[
    float | None,
    typer.Option(min=0.0, help="Time of a plain step. Default: that of a verify pass.", rich_help_panel=GIVEN),
]
MethodName = Annotated[str, typer.Option(help="Name of the method.", rich_help_panel=GIVEN)]
TargetGb = Annotated[float, typer.Option(min=0.0, help="Memory of the target with its cache.", rich_help_panel=GIVEN)]
DraftGb = Annotated[float, typer.Option(min=0.0, help="Memory of the draft with its cache.", rich_help_panel=GIVEN)]
DeviceGb = Annotated[float | None, typer.Option(min=0.0, help="Memory of the target's device.", rich_help_panel=GIVEN)]

PlotFile = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Write a plot.")]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE.html", help="Write an HTML page with table and plot.")
]
