"""Programmatic dependent launch (PDL): programs of a kernel may start before the previous kernel has ended.

`gdc_wait` returns when all earlier work in the stream is done and visible. Memory that another kernel writes must not be read
or written before it. `gdc_launch` allows the programs of the next kernel to start; it guarantees nothing about memory. The two
functions do nothing on devices older than Hopper and in the interpreter.
"""

import os
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents
from triton.language.extra.cuda import gdc_wait as _gdc_wait

from paceline.kernels.formats.layout import capability

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_PDL = not IS_INTERPRETED and capability() >= 90

PDL: dict[str, bool] = {"PDL": True, "launch_pdl": True} if HAS_PDL else {"PDL": False}
"""Launch keywords of kernels with the constexpr PDL."""


def hashed(function: Any) -> Any:
    """Decorator of a function that several kernels call and that reads constants of its module.

    Triton's hash of a kernel leaves these constants out if the kernel is the first caller that is hashed. With this decorator
    the hashes, which are the keys of compiled kernels on disk, do not depend on the order of launches.
    """
    return function if IS_INTERPRETED else (function.cache_key, function)[1]


@triton.jit
def gdc_wait(PDL: tl.constexpr):
    if PDL:
        _gdc_wait()


@triton.jit
def gdc_launch(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def prefetch(ptrs):
    """Prefetch the cache lines at `ptrs` into L2. Legal before `gdc_wait` for memory that no kernel writes."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
