"""Products with activations rounded to int8."""

import io
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.kernels.cpu import native
from paceline.kernels.formats.weights import Grouped
from paceline.kernels.linear import linear, prepare
from tests.kernels.cases import GROUPED, generator, make_weight, needs_native

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 33)
SHAPES = ((64, 64), (33, 96), (100, 160), (7, 32))

pytestmark = needs_native


def rounded(x: Tensor) -> Tensor:
    """[T, K] float64: activations as the kernels round them."""
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    largest = blocks.abs().amax(2, keepdim=True)
    codes = torch.where(largest > 2.0**-100, blocks * (127 / largest), 0.0).round()
    return (codes.double() * (largest / 127).double()).flatten(1)[:, : x.shape[1]]


def integer_weight(kind: str, outputs: int, inputs: int) -> Grouped:
    weight = make_weight(kind, outputs, inputs, activations="int8")
    assert isinstance(weight, Grouped)
    return weight


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_of_rounded_activations_are_close_to_double_precision(kind: str, outputs: int, inputs: int) -> None:
    weight = integer_weight(kind, outputs, inputs)
    prepared = prepare(weight, "cpu", torch.float32)
    bias = torch.randn(outputs, generator=generator(5))
    for rows in (*ROWS, 200):
        x = torch.randn(rows, inputs, generator=generator(rows))
        exact = rounded(x) @ weight.dequantize().double().T
        size = x.double().abs() @ weight.dequantize().double().abs().T + 32 * x.double().abs().sum(1, keepdim=True)
        assert ((linear(x, prepared) - exact).abs() <= 2e-6 * size).all()
        assert ((linear(x, prepared, bias) - (exact + bias)).abs() <= 2e-6 * size + 1e-6).all()


@pytest.mark.parametrize("kind", ["q4_16", "q8_16"])
@pytest.mark.parametrize("inputs", [16, 48, 80])
def test_inputs_need_not_be_a_multiple_of_32(kind: str, inputs: int) -> None:
    weight = integer_weight(kind, 40, inputs)
    x = torch.randn(5, inputs, generator=generator(2))
    exact = rounded(x) @ weight.dequantize().double().T
    out = linear(x, prepare(weight, "cpu", torch.float32))
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", GROUPED)
def test_the_bits_of_a_row_do_not_depend_on_other_rows(kind: str) -> None:
    weight = prepare(integer_weight(kind, 200, 192), "cpu", torch.float32)
    x = torch.randn(200, 192, generator=generator(3))
    x[7] *= 1e-36
    alone = torch.cat([linear(x[i : i + 1], weight) for i in range(len(x))])
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        for rows in (*ROWS, 200):
            for first in (0, 200 - rows):
                block = slice(first, first + rows)
                assert torch.equal(linear(x[block], weight), alone[block]), (threads, rows)


@pytest.mark.parametrize("kind", ["q4_32", "q8_32"])
def test_the_largest_sums_do_not_overflow(kind: str) -> None:
    weight = integer_weight(kind, 32, 64)
    code = 15 if kind == "q4_32" else -128
    extreme = Grouped(torch.full_like(weight.codes, code), torch.ones_like(weight.scales), None, 32)
    out = linear(torch.ones(3, 64), prepare(extreme, "cpu", torch.float32))
    torch.testing.assert_close(out, torch.full((3, 32), 64.0 * code))


def test_zeros_give_zeros_and_a_nan_stays_visible() -> None:
    weight = prepare(integer_weight("q4_32", 32, 64), "cpu", torch.float32)
    x = torch.zeros(2, 64)
    x[1, 40] = torch.nan
    out = linear(x, weight)
    assert (out[0] == 0).all()
    assert out[1].isnan().all()


CHECKSUMS = """
import hashlib, json, torch
from paceline.kernels.cpu import native
from paceline.kernels.linear import linear, prepare
from paceline.kernels.attention import paged_attention
from paceline.kernels.rms_norm import rms_norm
from tests.kernels.cases import GROUPED, generator, make_cache, make_layout, make_weight
sums = {}
def checksum(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
x = torch.randn(3, 600, generator=generator(1))
sums["norm"] = checksum(rms_norm(x, x[0].clone(), 1e-5))
for rows in (1, 5, 9):
    query, layout = torch.randn(rows, 4, 64, generator=generator(rows)), make_layout([37], [rows], 8)
    for window in (None, 20):
        sums[f"attention {rows} {window}"] = checksum(paged_attention(query, *make_cache(8, 2, 64), layout, 0.1, window))
for kind in GROUPED:
    weight = prepare(make_weight(kind, 100, 192, activations="int8"), "cpu", torch.float32)
    for rows in (1, 2, 3, 5, 8, 19, 40):
        out = linear(torch.randn(rows, 192, generator=generator(rows)), weight)
        sums[f"{kind} {rows}"] = checksum(out)
print(json.dumps([native.instructions(), sums]))
"""


def chosen() -> list[object]:
    """Instructions that this process has chosen, and checksums of its products."""
    with redirect_stdout(io.StringIO()) as printed:
        exec(CHECKSUMS, {})
    return json.loads(printed.getvalue())


def forced(instructions: str) -> list[object]:
    """Instructions in use and checksums of products in a process that uses `instructions`."""
    environment = {**os.environ, "PACELINE_NATIVE": "1", "PACELINE_INSTRUCTIONS": instructions}
    done = subprocess.run(
        [sys.executable, "-c", CHECKSUMS],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout)


def available() -> list[str]:
    """Instruction sets that this CPU can run besides the portable code."""
    if platform.machine() in ("aarch64", "arm64"):
        features = {"neon": "asimd", "sdot": "asimddp", "i8mm": "i8mm"}
    else:
        features = {"avx2": "avx2", "avx-vnni": "avx_vnni", "avx512": "avx512bw"}
        features |= {"avx512-vnni": "avx512_vnni", "amx": "amx_int8"}
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return []
    return [name for name, feature in features.items() if feature in words]


@pytest.mark.parametrize("sets", [[], pytest.param(available(), marks=pytest.mark.slow)], ids=["chosen", "all"])
def test_bits_are_the_same_on_every_instruction_set_of_this_cpu(sets: list[str]) -> None:
    with ThreadPoolExecutor(2) as threads:  # each compiles the kernels
        (name, expected), *others = threads.map(forced, ["portable", *sets])
    assert name == "portable"
    for used, sums in (chosen(), *others):
        assert used != "portable"
        assert sums == expected, used


def test_an_unknown_instruction_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_INSTRUCTIONS", "mmx")
    with pytest.warns(RuntimeWarning, match="avx512-vnni"):
        assert native.library.__wrapped__() is None
