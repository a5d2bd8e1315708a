"""Products of any number of rows, whose bits do not depend on that number.

Every product sums K from first to last into one float32 accumulator and is rounded once. Few rows are computed by our kernel.
Many rows of dense weights are computed by the vendor's library, which has the same order where it does not split K:
`sum_in_one_part` forbids splitting, and `VendorCheck` compares the library with our kernel on this machine, for each shape and
number of rows, before its result is used. Where the bits differ, our kernel computes all rows.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear as dense_linear
from torch.nn.functional import pad

from paceline.kernels.formats.linear import DenseWeight, LinearWeight
from paceline.kernels.gpu.linear import linear, most_rows

_STEP = 64
"""Numbers of rows above `_ANY` are padded to a multiple of this number, so that few of them are compared."""
_ANY = 512
_DRIVER = Path("/proc/driver/nvidia/version")


def product(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [T, K] -> [T, N], written to `out` if given."""
    rows, kind = len(x), out_dtype or x.dtype
    if rows <= most_rows(x.shape[1]) or not isinstance(weight, DenseWeight):
        return linear(x, weight, bias, kind, out=out)
    if rows > _ANY and rows % _STEP:
        whole = _many(pad(x, (0, 0, 0, -rows % _STEP)), weight, bias, kind, None)[:rows]
        return whole if out is None else out.copy_(whole)
    return _many(x, weight, bias, kind, out)


def _many(x: Tensor, weight: DenseWeight, bias: Tensor | None, kind: torch.dtype, out: Tensor | None) -> Tensor:
    if x.device.type == "meta":
        linear(x, weight, bias, kind)  # a check compiles it
    if x.device.type == "cuda" and not vendor_check().has_our_bits(x, weight, bias, kind):
        return linear(x, weight, bias, kind, out=out)
    return _by_vendor(x, weight.values, bias, kind, out)


def _by_vendor(x: Tensor, weight: Tensor, bias: Tensor | None, kind: torch.dtype, out: Tensor | None) -> Tensor:
    if kind is x.dtype:
        computed = dense_linear(x, weight, bias)
        return computed if out is None else out.copy_(computed)
    assert bias is None
    if x.is_cpu:  # the interpreter
        computed = dense_linear(x.to(kind), weight.to(kind))
        return computed if out is None else out.copy_(computed)
    if out is None:
        return torch.mm(x, weight.t(), out_dtype=kind)
    return torch.mm(x, weight.t(), out_dtype=kind, out=out)


def sum_in_one_part() -> None:
    """From now on the vendor's library does not split K in this process. Its other library of products cannot be told so."""
    if torch.backends.cuda.preferred_blas_library() is not torch._C._BlasBackend.Cublaslt:
        torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


@dataclass(slots=True)
class VendorCheck:
    """Which products of the vendor's library have the bits of our kernel. The answers are kept in `file`, under the versions of
    all that they depend on."""

    file: Path
    versions: str
    compare: Callable[[Tensor, DenseWeight, Tensor | None, torch.dtype], bool]
    _known: dict[str, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = self._stored().get(self.versions, {})

    def has_our_bits(self, x: Tensor, weight: DenseWeight, bias: Tensor | None, kind: torch.dtype) -> bool:
        """For a product of this shape. A product that is first met during a capture is left to our kernel."""
        outputs, inputs = weight.shape
        key = f"{len(x)} rows, {outputs}x{inputs}, {x.dtype} to {kind}{', bias' if bias is not None else ''}"
        if key not in self._known:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                return False
            self._known[key] = self.compare(x, weight, bias, kind)
            self._store()
        return self._known[key]

    def _stored(self) -> dict[str, dict[str, bool]]:
        try:
            stored = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}
        return stored if isinstance(stored, dict) else {}

    def _store(self) -> None:
        """Several processes may write at once: the file is replaced when complete, and what is lost is compared again. Without
        a place to write, the next process compares again too."""
        self._known = {**self._stored().get(self.versions, {}), **self._known}
        part = self.file.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part.write_text(json.dumps({**self._stored(), self.versions: self._known}, indent=1, sort_keys=True))
            part.replace(self.file)


@cache
def vendor_check() -> VendorCheck:
    device = torch.cuda.get_device_name()
    driver = _DRIVER.read_text().partition("\n")[0] if _DRIVER.exists() else "no driver"
    versions = f"{device}, {driver}, CUDA {torch.version.cuda}, torch {torch.__version__}, triton {triton.__version__}"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
    return VendorCheck(folder / "products.json", versions, compare)


@torch.inference_mode()
def compare(x: Tensor, weight: DenseWeight, bias: Tensor | None, kind: torch.dtype) -> bool:
    """Whether the vendor's library and our kernel give the same bits, with random inputs of the shape of `x`."""
    generator = torch.Generator(x.device).manual_seed(len(x))
    given = torch.randn(x.shape, generator=generator, device=x.device, dtype=torch.float32).to(x.dtype)
    return torch.equal(_by_vendor(given, weight.values, bias, kind, None), linear(given, weight, bias, kind))
