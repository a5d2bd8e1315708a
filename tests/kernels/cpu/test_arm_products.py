"""Integer products of ARM instruction sets in an emulator: the same bits as plain C. It shows nothing about their speed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.kernels.cpu import native

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
SOURCES = ("int_linear.c", "int_input.c", "pool.c")
NAMES = {"portable": "portable", "neon": "NEON", "sdot": "SDOT", "i8mm": "I8MM"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
        reason="needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user",
    ),
]


def products(kind: str, folder: Path) -> tuple[str, str]:
    """Instructions and checksums."""
    kernels, program = Path(native.__file__).parent, folder / kind
    flags = [flag for flag in native._flags() if not flag.startswith(("-march", "-mcpu"))]
    sources = [str(Path(__file__).with_name("products.c")), *(str(kernels / name) for name in SOURCES)]
    command = [COMPILER, *flags, *native._INSTRUCTIONS[kind].split(), "-static", f"-I{kernels}", "-o", str(program)]
    subprocess.run([*command, *sources, "-lm"], check=True)
    output = subprocess.run([EMULATOR, "-cpu", "max", str(program)], check=True, capture_output=True, text=True).stdout
    name, _, sums = output.strip().partition(" ")
    return name, sums


def test_the_bits_of_plain_c(tmp_path: Path) -> None:
    found = {kind: products(kind, tmp_path) for kind in NAMES}
    assert {kind: name for kind, (name, _) in found.items()} == NAMES
    assert len({sums for _, sums in found.values()}) == 1
