"""Programmatic dependent launch: a kernel's programs may start before the kernel in front of them has ended.

`gdc_wait` returns when everything before this kernel in the stream is done and visible; nothing that depends on another kernel
may be read or written before it. `gdc_launch` lets the next kernel's programs in; it promises nothing about memory. Both are
nothing on devices older than Hopper, and in the interpreter.
"""

import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents
from triton.language.extra.cuda import gdc_wait as _gdc_wait

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_PDL = not IS_INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9

PDL: dict[str, bool] = {"PDL": True, "launch_pdl": True} if HAS_PDL else {"PDL": False}
"""Keywords for the launch of a kernel that takes the constexpr PDL."""


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
    """Ask for the cache lines at `ptrs` to be brought into L2. Legal before `gdc_wait` for what no kernel writes."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
