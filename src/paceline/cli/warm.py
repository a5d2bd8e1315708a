"""`paceline warm`: compiles the GPU kernels of a server into a folder that can be shipped."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import ENGINE, with_settings
from paceline.cli.render import console
from paceline.server.config.config import ServerConfig

Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The folder for the compiled kernels.")]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu", metavar="NAME", help="The GPU to compile for: h100, h200 or a100. Default: this machine's GPU."
    ),
]


@with_settings(ENGINE)
def warm(config: ServerConfig, out: Out, gpu: Gpu = None) -> None:
    """Compile all GPU kernels that serve with the same options needs, on all cores.

    Serve with --kernel-cache FOLDER, here or on another machine with the same GPU and the same versions of torch and Triton.
    With --gpu the machine that compiles needs no GPU. No weights are read.
    """
    with console.err.status("compiling kernels"):
        from paceline.engine.start.warm import compile_into

        report = compile_into(out, config.engine, gpu)
    console.out.print(
        f"{report.kernels} kernels in {out} ({report.compiled} compiled now) after {report.seconds:.0f} s: "
        f"paceline serve --kernel-cache {out}, with the same options",
        soft_wrap=True,
    )
    if not report.has_launchers:
        console.out.print("The launchers need libcuda: the first start on a machine with a GPU adds them, in seconds.")
