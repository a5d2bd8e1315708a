"""`paceline bench inflate`: a large target for benchmarks, made out of a small model."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import console
from paceline.cli.bar import counting_bar
from paceline.core.config import EngineConfig


def inflate(
    shape: Annotated[str, typer.Option(help="llama-1b, llama-8b or llama-70b.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write it; must not exist.")],
    base: Annotated[str, typer.Option(help="The small Llama inside: a folder, a GGUF file or a name.")] = "smollm2",
    noise: Annotated[
        float, typer.Option(help="Added to the small model's layers, in deviations of a weight: lowers alpha.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of noise and filler.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    quantization: Annotated[str, typer.Option(help="none, int8 or fp8, of the layers' matrices.")] = "none",
    device: Annotated[str, typer.Option(help="Where the random numbers are made.")] = "cpu",
) -> None:
    """Write a large model that computes what a small one does: its cost, with real text.

    The folder loads here and in transformers. Without a folder, as the value of --model:
    `inflate:llama-8b?base=smollm2&noise=0.06&seed=0`.
    """
    from paceline.bench.inflate import make, write_folder  # brings torch along
    from paceline.engine.build import pick_device, pick_dtype, pick_quantization
    from paceline.models.architectures.inflation import Inflation

    config = EngineConfig(device=device, dtype=dtype, quantization=quantization)  # type: ignore[arg-type]  # it checks
    where = pick_device(config.device)
    checkpoint = make(
        Inflation(shape, base, noise, seed),
        where,
        pick_dtype(config.dtype, where),
        pick_quantization(config.quantization),
    )
    with counting_bar() as bar:
        task = bar.add_task("weights", total=None)
        size = write_folder(checkpoint, out, lambda done, of: bar.update(task, completed=done, total=of))
    parameters = checkpoint.config.num_parameters
    summary = f"{checkpoint.name}: {parameters / 1e9:.2f} billion weights, {size / 1e9:.1f} GB in {out}"
    console.out.print(summary, markup=False, soft_wrap=True)
