"""What the bytes of a cache block depend on besides its tokens: where this is equal blocks may be exchanged, nowhere else."""

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version

from paceline.kernels.cpu import native
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.runner import ModelRunner


def cache_fingerprint(runner: ModelRunner, weights: str, quantization: str) -> bytes:
    """32 bytes. `weights`: a checksum of the model's files, see `weights_sum`; `quantization`: what was done to them while
    loading. Kernels of another version, device or processor may round otherwise, so they count too."""
    is_native = runner.device.type == "cpu" and native.available()
    parts = (
        ("weights", weights),
        ("quantization", quantization),
        ("model", repr(runner.model.config)),
        ("dtype", str(runner.model.dtype)),
        ("cache", f"{runner.cache[0][0].dtype} {tuple(runner.cache[0][0].shape[1:])} x {len(runner.cache)}"),
        ("block", str(BLOCK_SIZE)),
        ("device", runner.device.type),
        ("kernels", f"{_version()} {platform.machine()} {'native' if is_native else 'torch'}"),
    )
    return hashlib.sha256("".join(f"{name}: {value}\n" for name, value in parts).encode()).digest()


def _version() -> str:
    try:
        return version("paceline")
    except PackageNotFoundError:  # run from a source tree
        return ""
