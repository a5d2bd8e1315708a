"""Prints which kernels of 8-bit products of more than 64 rows an engine on the device `meta` lists: for each number of inputs,
whether the number of rows is a multiple of 16. Their tile has 128 rows per program, which no other tile has."""

import json

from paceline.core.config import EngineConfig
from paceline.kernels.formats.layout import GpuModel, compile_for

compile_for(GpuModel("NVIDIA H200", 90, 132, 150_000_000_000))

from paceline.engine.start.build import build_engine  # noqa: E402  # after compile_for
from paceline.kernels.gpu import compilation, tiles  # noqa: E402
from paceline.kernels.gpu.linear_kernels import linear_kernel  # noqa: E402

CONFIG = EngineConfig(
    model="smollm2",
    draft="none",
    device="meta",
    quantization="fp8",
    max_num_seqs=1,
    max_batched_tokens=100,
    max_model_len=128,
    kv_tokens=1024,
)
SHAPES = (960, 576), (576, 576), (3072, 576), (576, 1536)


def is_wide(spec: compilation.KernelSpec) -> tuple[int, bool] | None:
    """(inputs, whether the rows are a multiple of 16) of a kernel with 128 rows per program."""
    data, names = json.loads(spec.data), linear_kernel.arg_names
    constants = {names[key[0]]: value for key, value in zip(data["constant_keys"], data["constant_vals"], strict=True)}
    divisible = {names[key[0]] for key, value in zip(data["attrs_keys"], data["attrs_vals"], strict=True) if value}
    return (constants["k"], "m" in divisible) if constants["BLOCK_T"] == 128 else None


if __name__ == "__main__":
    keys = [tiles.tile_key(tiles.RowClass.MORE, *shape, 1, False) for shape in SHAPES]
    measured = tiles._measured() | dict.fromkeys(keys, tiles.Tile(128, 64, 8, 3, rows=128))
    tiles._measured = lambda: measured  # type: ignore[assignment]
    found: list[compilation.KernelSpec] = []
    compilation.target_gpu(90)
    compilation.record_kernels(found.append)
    build_engine(CONFIG).warm_up()
    compilation.compile_again()
    wide = [(kind, spec) for spec in found if spec.name == "linear_kernel" and (kind := is_wide(spec)) is not None]
    print(json.dumps(sorted({kind for kind, _ in wide})))
    print(compilation.compile_kernel(wide[0][1]))
