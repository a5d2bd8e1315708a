"""The machine: processor, memory, GPU, versions, compiler, optional packages."""

import os
import platform
import shutil
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from paceline.cli.check import Check
from paceline.core.machine import available_memory, total_memory, usable_cores
from paceline.engine.memory_fit import GIB
from paceline.kernels.cpu import native

VERSIONS = ("paceline", "torch", "numpy", "safetensors", "tokenizers")
EXTRAS = {
    "jinja2": ("chat", "chat templates"),
    "llguidance": ("grammar", "JSON schemas"),
    "huggingface_hub": ("hub", "models by their Hugging Face id"),
    "fastapi": ("server", "the server"),
    "uvicorn": ("server", "the server"),
    "prometheus_client": ("server", "metrics"),
    "yaml": ("server", "configuration files"),
    "httpx": ("bench", "bench --against"),
    "matplotlib": ("bench", "bench --plot"),
    "zmq": ("pool", "clusters"),
    "msgspec": ("pool", "clusters"),
    "opentelemetry.exporter.otlp.proto.http": ("trace", "traces"),
}
"""Module: the extra that installs it, and what needs it."""


def check_machine() -> Iterator[Check]:
    yield Check("system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}")
    yield Check("versions", ", ".join(f"{name} {_version(name)}" for name in VERSIONS))
    yield _processor()
    yield Check("memory", f"{_gib(total_memory())}{_available()}")
    yield _gpu()
    yield _kernels()
    yield _extras()


def _processor() -> Check:
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    usable, present = usable_cores(), os.cpu_count() or 1
    cores = f"{usable} cores" if usable == present else f"{usable} of {present} cores"
    return Check("processor", f"{name}, {cores}")


def _gpu() -> Check:
    if torch.cuda.is_available():
        names = []
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            names.append(f"{torch.cuda.get_device_name(i)}, {_gib(free)} of {_gib(total)} free")
        return Check("GPU", "; ".join(names))
    if shutil.which("nvidia-smi") and torch.version.cuda is None:
        return Check.note(
            "GPU",
            "there seems to be one, and this torch is a CPU build",
            "install a CUDA build of torch: pip install torch --index-url https://download.pytorch.org/whl/cu128",
        )
    return Check("GPU", "none that torch can use; models run on the CPU")


def _kernels() -> Check:
    if os.environ.get("PACELINE_NATIVE", "1") == "0":
        return Check.note(
            "CPU kernels", "switched off by PACELINE_NATIVE=0", "unset it: decoding is several times faster"
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if native.available():
            return Check("CPU kernels", "compiled for this processor; text is the same bit for bit in any batch")
    if torch.cuda.is_available():
        return Check("CPU kernels", "not available, and not needed on a GPU")
    # NOTE: the warning is given once; a later call in the same process finds its reason gone.
    reason = str(caught[0].message) if caught else "install a C compiler: apt install gcc, or pip install ziglang"
    return Check.note("CPU kernels", "not available: the text is right, decoding several times slower", reason)


def _extras() -> Check:
    missing = [module for module in EXTRAS if not _is_installed(module)]
    if not missing:
        return Check("optional packages", "all installed")
    lacking = ", ".join(f"{module} ({EXTRAS[module][1]})" for module in missing)
    extras = ",".join(dict.fromkeys(EXTRAS[module][0] for module in missing))
    return Check.note("optional packages", f"missing: {lacking}", f"pip install 'paceline[{extras}]'")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # it is inside a package that is not there either
        return False


def _available() -> str:
    available = available_memory()
    return "" if available is None else f", {_gib(available)} available"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
