"""The GPU that kernels are launched on.

Tensors on the device `meta` have no memory: there, launches only choose which kernels a GPU needs, and nothing is computed.
`compile_for` names that GPU.
"""

from dataclasses import dataclass

import torch

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class GpuModel:
    """What the choice of kernels depends on."""

    name: str
    capability: int
    """Compute capability, such as 90 for Hopper."""
    multiprocessors: int
    memory_bytes: int


_meta: GpuModel | None = None


def compile_for(gpu: GpuModel) -> None:
    """Make `meta` stand for this GPU. Call it before any kernel is imported."""
    global _meta
    _meta = gpu


def gpu_model(device: torch.device) -> GpuModel | None:
    """The GPU behind `device`; None for a CPU."""
    if device.type == "meta":
        return _meta
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return GpuModel(
        properties.name,
        10 * properties.major + properties.minor,
        properties.multi_processor_count,
        int(torch.cuda.mem_get_info(device)[1]),
    )


def capability() -> int:
    """Compute capability that kernels are compiled for; 0 without a GPU."""
    if _meta is not None:
        return _meta.capability
    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def uses_gpu_kernels(device: torch.device) -> bool:
    return device.type in ("cuda", "meta")
