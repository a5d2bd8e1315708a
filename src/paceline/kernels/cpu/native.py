"""Compiles the C kernels in this folder at first use, for the CPU of this machine, and calls them through ctypes.

The shared object is kept in the user's cache folder. `library()` is None if the kernels are unavailable (no C compiler, an
unsupported CPU, PACELINE_NATIVE=0). Then every operation uses its torch reference, and one warning names what to install.

The kernels are batch invariant: the bits of a row's result do not depend on the number of rows, on the other rows, on the
chunks of a prefill, on the number of threads, or on the instruction set.
"""

import ctypes
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.machine import phase, show_share, usable_cores

LONG_ROWS = 16
"""Rows from which on a call releases the interpreter lock; it then runs for milliseconds. A shorter call keeps the lock,
because re-acquiring it can take longer than the call."""

_SOURCES = Path(__file__).parent
_ARGUMENTS = {
    "paceline_set_threads": [c_int64],
    "paceline_set_spin": [c_int64],
    "paceline_linear": [c_void_p] * 4 + [c_int64],
    "paceline_embedding": [c_void_p] * 3 + [c_int64],
    "paceline_rms_norm": [c_void_p] * 5 + [c_int64] * 2 + [c_float],
    "paceline_head_norm": [c_void_p] * 3 + [c_int64] * 4 + [c_float],
    "paceline_joined_head_norm": [c_void_p] * 3 + [c_int64] * 4 + [c_float],
    "paceline_gated": [c_void_p] * 2 + [c_int64] * 3,
    "paceline_route": [c_void_p] * 4 + [c_int64] * 7 + [c_float],
    "paceline_experts": [c_void_p] * 3 + [c_int64],
    "paceline_rotary": [c_void_p] * 7 + [c_int64] * 4,
    "paceline_attention": [c_void_p] * 10 + [c_int64] * 7 + [c_float] * 2,
    "paceline_copy_slots": [c_void_p, c_int64] + [c_void_p] * 2 + [c_int64] * 2,
    "paceline_copy_rows": [c_void_p, c_int64] * 2 + [c_int64] + [c_void_p] * 2 + [c_int64] * 2,
    "paceline_decoder": [c_void_p] * 3,
    "paceline_decoder_pass": [c_void_p] * 3,
    "paceline_eagle": [c_void_p] * 5 + [c_int64],
    "paceline_eagle_draft": [c_void_p] * 5 + [c_int64] + [c_void_p] * 2,
    "paceline_eagle_trees": [c_void_p] * 2,
    "paceline_top": [c_void_p] * 4 + [c_int64] * 3,
    "paceline_sample": [c_void_p] * 12 + [c_int64] * 3,
    "paceline_crc32": [c_void_p, c_int64, c_void_p, c_void_p],
    "paceline_word_sum": [c_void_p, c_int64, c_void_p],
}
_INSTRUCTIONS = {
    "portable": "-DPORTABLE -O1",
    "neon": "-march=armv8-a",
    "sdot": "-march=armv8.2-a+dotprod+fp16",
    "i8mm": "-march=armv8.6-a+i8mm+fp16",
    "avx2": "-march=haswell",
    "avx-vnni": "-march=haswell -mavxvnni",
    "avx512": "-march=skylake-avx512",
    "avx512-vnni": "-march=cascadelake",
    "amx": "-march=sapphirerapids",
}
"""Compiler flags of the instruction sets that PACELINE_INSTRUCTIONS can force, for tests."""


@dataclass(frozen=True, slots=True)
class Library:
    """The functions, loaded twice: `quick` keeps the interpreter lock during a call, `long` releases it."""

    quick: ctypes.PyDLL
    long: ctypes.CDLL
    instructions: str
    """Instructions of the integer products."""

    def for_rows(self, rows: int) -> ctypes.CDLL:
        return self.quick if rows < LONG_ROWS else self.long


@cache
def library() -> Library | None:
    if os.environ.get("PACELINE_NATIVE", "1") == "0":
        return None
    try:
        path = str(_build())
        quick, long = ctypes.PyDLL(path), ctypes.CDLL(path)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"native kernels are unavailable, decoding on CPU will be several times slower: {reason.strip()[-500:]}. "
            "Install a C compiler (apt install gcc, or pip install ziglang), or set PACELINE_NATIVE=0 to accept this.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    for handle in (quick, long):
        for name, arguments in _ARGUMENTS.items():
            getattr(handle, name).argtypes = arguments
            getattr(handle, name).restype = None
    long.paceline_instructions.restype = ctypes.c_char_p
    instructions = long.paceline_instructions().decode()
    long.paceline_set_threads(usable_cores())
    return Library(quick, long, instructions)


def available() -> bool:
    return library() is not None


def supports(x: Tensor) -> bool:
    """Whether native kernels can process `x`, which must be float32 on the CPU without a gradient."""
    return x.is_cpu and x.dtype is torch.float32 and not x.requires_grad and library() is not None


def instructions() -> str:
    """Instructions of the integer products, such as AVX-512 VNNI or SDOT; "none" without native kernels."""
    loaded = library()
    return "none" if loaded is None else loaded.instructions


def set_num_threads(count: int) -> None:
    """Set the number of threads of the native kernels, by default one per usable core. Results do not depend on it."""
    loaded = library()
    if loaded is not None:
        loaded.long.paceline_set_threads(count)


def set_spin_seconds(seconds: float) -> None:
    """Set how long idle threads of the native kernels wait for the next call before they sleep, by default 0.1 ms. Waking them
    delays a call, waiting takes their cores from other programs."""
    loaded = library()
    if loaded is not None:
        loaded.long.paceline_set_spin(int(seconds * 1e9))


@contextmanager
def single_threaded_torch() -> Iterator[None]:
    """Limit torch to the calling thread while the context is active: two thread pools that spin on the same cores are far
    slower than one. It has no effect without native kernels."""
    before = torch.get_num_threads()
    if available():
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _build() -> Path:
    """Path of the shared object for these sources, compiler and CPU. Several processes may build it at once: it is renamed to
    its path when complete."""
    sources = sorted(_SOURCES.glob("*.[ch]"))
    compiler, flags = _compiler(), _flags()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    parts = [*compiler, *flags, version, _cpu(), *(file.name + file.read_text() for file in sources)]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
    target = folder / f"kernels-{digest}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (
            phase("compile kernels") as compiling,
            tempfile.TemporaryDirectory(dir=folder) as work,
            ThreadPoolExecutor(usable_cores()) as threads,
        ):
            compiling.note = "once"
            built = Path(work) / target.name
            extra = _branch_flags(compiler, Path(work))
            files, ended = [file for file in sources if file.suffix == ".c"], itertools.count(1)

            def compiled(source: Path) -> str:
                path = str(Path(work) / f"{source.stem}.o")
                _run([*compiler, *flags, *extra, "-c", "-o", path, str(source)])
                show_share(next(ended) / len(files))
                return path

            objects = list(threads.map(compiled, files))
            _run([*compiler, *flags, "-shared", "-o", str(built), *objects, "-lm"])
            os.replace(built, target)
    return target


def _branch_flags(compiler: list[str], work: Path) -> list[str]:
    """Flags that keep branches within 32 bytes, where the assembler can. Intel CPUs up to Cascade Lake do not cache decoded
    instructions around a branch that crosses them, so that a loop is up to a tenth slower, by its address."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    flag = "-Wa,-mbranches-within-32B-boundaries"
    command = [*compiler, flag, "-x", "c", "-c", "-o", str(work / "empty.o"), "-"]
    return [] if subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL).returncode else [flag]


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)


def _compiler() -> list[str]:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name.split()[0]):
            return name.split()
    if find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise FileNotFoundError("no C compiler found")


def _flags() -> list[str]:
    forced = os.environ.get("PACELINE_INSTRUCTIONS")
    if forced and forced not in _INSTRUCTIONS:
        raise OSError(f"PACELINE_INSTRUCTIONS must be one of {', '.join(_INSTRUCTIONS)}, not {forced}")
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    tune = _INSTRUCTIONS[forced] if forced else native
    # -ffp-contract=off: only the explicit multiply-adds are fused, in every instantiation of a kernel
    fixed = "-O3 -std=gnu11 -fPIC -pthread -fvisibility=hidden -ffp-contract=off -fno-math-errno"
    return [*fixed.split(), *tune.split()]


def _cpu() -> str:
    """Description of the CPU, on which -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )
