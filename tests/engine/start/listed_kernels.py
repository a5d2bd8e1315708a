"""Prints the number of kernels that an engine on the device `meta` lists, whether one of them is compiled twice, and the names
of those that are compiled for a GPU without an error, one of each."""

from paceline.core.config import EngineConfig, SpeculationConfig
from paceline.kernels.formats.layout import GpuModel, compile_for

compile_for(GpuModel("NVIDIA H200", 90, 132, 150_000_000_000))

from paceline.engine.start.build import build_engine  # noqa: E402  # after compile_for
from paceline.kernels.gpu import compilation  # noqa: E402

CONFIG = EngineConfig(
    model="smollm2",
    draft="smollm2",
    device="meta",
    max_num_seqs=2,
    max_batched_tokens=32,
    max_model_len=64,
    kv_tokens=1024,
    speculation=SpeculationConfig(max_depth=2),
)

if __name__ == "__main__":
    found: list[compilation.KernelSpec] = []
    compilation.target_gpu(90)
    compilation.record_kernels(found.append)
    build_engine(CONFIG).warm_up()
    compilation.compile_again()
    (spec,) = [spec for spec in found if spec.name == "_gated"]
    print(len(found), len(set(found)), compilation.compile_kernel(spec), compilation.compile_kernel(spec))
    for kernel in {spec.name: spec for spec in found}.values():
        compilation.compile_kernel(kernel)
    print(" ".join(sorted({spec.name for spec in found})))
