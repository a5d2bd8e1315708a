"""Which kernels a program launches, and their compilation in other processes.

A kernel is compiled once for each specialisation: the types of its arguments, their divisibility by 16, and its constants.
Compiled kernels are files in Triton's cache folder, which all processes share.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

_LAUNCHERS_DIFFER = hasattr(nvidia, "make_launcher")
"""Whether every signature has a launcher of its own; newer versions have one for all kernels."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One specialisation of a kernel; it can be sent to another process."""

    module: str
    name: str
    data: str
    """Types and constants, as Triton writes them."""


@dataclass(slots=True)
class CacheCounts:
    """Kernels that this process has looked up in the cache folder."""

    hits: int = 0
    misses: int = 0


def target_gpu(capability: int) -> None:
    """Compile for a GPU of this capability, whether or not this machine has one."""
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )


def record_kernels(found: Callable[[KernelSpec], object]) -> None:
    """From now on launches of this process run nothing; `found` receives each specialisation at its first launch."""

    def record(*, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        fn.jit_function.device_caches[0][0][key] = _NotLaunched
        found(KernelSpec(fn.module, fn.name, compile["specialization_data"]))
        return True  # do not compile it here

    triton.knobs.runtime.jit_cache_hook = record


def compile_kernel(spec: KernelSpec) -> bool:
    """Compile the kernel and its launcher into the cache folder. Returns False if the kernel was there already."""
    counts = count_lookups()
    kernel = getattr(importlib.import_module(spec.module), spec.name).preload(spec.data)
    if has_launchers() and _LAUNCHERS_DIFFER:
        nvidia.CudaLauncher(kernel.src, kernel.metadata)
    return counts.misses > 0


@cache
def has_launchers() -> bool:
    """Whether this machine can compile launchers, which are linked with libcuda."""
    if not _LAUNCHERS_DIFFER:
        return True
    try:
        return bool(nvidia.library_dirs())
    except (AssertionError, OSError):
        return False


def count_lookups() -> CacheCounts:
    """Counts of this process from now on."""
    counts = CacheCounts()

    def listen(*, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            counts.hits += 1
        else:
            counts.misses += 1

    triton.knobs.compilation.listener = listen
    return counts


def compile_again() -> None:
    """Undo `record_kernels` in a process that inherited it."""
    triton.knobs.runtime.jit_cache_hook = None


class _NotLaunched:
    """A kernel whose launch does nothing."""

    function = packed_metadata = None

    @staticmethod
    def run(*_: Any) -> None: ...

    @staticmethod
    def launch_metadata(*_: Any) -> None: ...
