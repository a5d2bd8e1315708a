"""Compiles kernels for an H200 on a machine without a GPU. Launches become compilations; tensors are on the CPU and not
computed.

Import this module before any kernel: a process either interprets or compiles kernels, and this one compiles.
"""

import functools
from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

COMPILED: set[str] = set()


def compile_only(kernel: JITFunction, grid: Any) -> Any:
    COMPILED.add(kernel.__name__)
    return functools.partial(kernel.warmup, grid=grid)


driver.set_active(
    SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
)
JITFunction.__getitem__ = compile_only

from paceline.kernels.gpu import launch  # noqa: E402

launch.PDL.update(PDL=True, launch_pdl=True)
