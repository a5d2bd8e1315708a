"""4-bit folders, written as AutoAWQ, GPTQModel and compressed-tensors write them, against transformers with the same values."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.four_bit import FourBitWeight
from paceline.kernels.formats.four_bit import pack as pack_for_gpu
from paceline.kernels.formats.linear import DenseWeight
from paceline.kernels.formats.weights import FourBit
from paceline.model_files.metadata import Metadata
from paceline.models.decoder.forward import DecoderModel
from paceline.models.families.prequantized import four_bit_scheme
from paceline.models.loading.load import build_model, weight_bytes
from paceline.models.weights.checkpoint import Float32Activations
from paceline.models.weights.safetensors import open_folder
from tests.models.paged import PagedRunner, relative_error
from tests.models.tiny import build

GROUP = 32
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output in each place of a word, lowest bits first."""


def rounded(values: Tensor, has_zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], scales and zeros [N, K/G] of the nearest 4-bit matrix."""
    groups = values.unflatten(1, (-1, GROUP))
    least, most = (groups.amin(2), groups.amax(2)) if has_zeros else (-groups.abs().amax(2), groups.abs().amax(2))
    scales = ((most - least) / 15).half()
    zeros = (-least / scales.float()).round().clamp(1, 15) if has_zeros else torch.full_like(least, 8.0)
    codes = (groups / scales.float().unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, 15)
    return codes.flatten(1).int(), scales, zeros.int()


def words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[A, 8 B] -> [A, B] int32."""
    packed = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int32)
    for place, source in enumerate(order):
        packed |= codes[:, source::8].int() << (4 * place)
    return packed


def awq(codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    return {
        "qweight": words(codes.t(), AWQ_ORDER),
        "qzeros": words(zeros.t(), AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }


def gptq(codes: Tensor, scales: Tensor, zeros: Tensor, subtracted: int = 1) -> dict[str, Tensor]:
    return {
        "qweight": words(codes).t().contiguous(),
        "qzeros": words((zeros - subtracted).t()),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(codes.shape[1]) // GROUP).int(),
    }


def packed(codes: Tensor, scales: Tensor, zeros: Tensor, has_zeros: bool = False) -> dict[str, Tensor]:
    parts = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor(codes.shape)}
    return parts | ({"weight_zero_point": words(zeros.t()).t().contiguous()} if has_zeros else {})


FORMATS: dict[str, tuple[dict[str, Any], bool, Callable[..., dict[str, Tensor]]]] = {
    "awq": (AWQ, True, awq),
    "gptq": (GPTQ, True, gptq),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, True, lambda *parts: gptq(*parts, subtracted=0)),
    "compressed-tensors": (PACKED, False, packed),
    "compressed-tensors, zeros": (PACKED, True, lambda *parts: packed(*parts, has_zeros=True)),
}


def write(folder: Path, name: str, family: str = "llama") -> dict[str, Tensor]:
    """Write a tiny model with 4-bit matrices. Returns their values."""
    scheme, has_zeros, pack = FORMATS[name]
    build(family).save_pretrained(folder)
    tensors, meant = load_file(folder / "model.safetensors"), {}
    for weight in [weight for weight in tensors if weight.endswith("_proj.weight")]:
        codes, scales, zeros = rounded(tensors.pop(weight), has_zeros)
        wide = (values.repeat_interleave(GROUP, 1) for values in (zeros, scales.float()))
        meant[weight] = (codes - next(wide)) * next(wide)
        tensors |= {weight.removesuffix("weight") + part: values for part, values in pack(codes, scales, zeros).items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    return meant


@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_has_exactly_the_values_of_its_codes(name: str, tmp_path: Path) -> None:
    meant = write(tmp_path, name)
    checkpoint = open_folder(tmp_path)
    for weight, values in meant.items():
        matrix = checkpoint.weights.matrix(weight)
        assert isinstance(matrix, FourBit)
        assert torch.equal(matrix.dequantize(), values), weight
        on_gpu = pack_for_gpu(matrix, "cpu")
        assert on_gpu is not None
        assert on_gpu.group == GROUP
        assert torch.equal(on_gpu.dequantize(), values), weight
    assert {*meant} <= checkpoint.weights.names()


@pytest.mark.parametrize("name", ["awq", "compressed-tensors"])
def test_a_gpu_keeps_the_codes_of_layers(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    checkpoint, meta = open_folder(tmp_path), torch.device("meta")
    for quantization in (None, "int8"):
        model = build_model(checkpoint, meta, torch.bfloat16, quantization)
        assert all(isinstance(matrix, FourBitWeight) for layer in model.layers for matrix in layer.matrices)
        assert isinstance(model.head, DenseWeight)
    estimate = weight_bytes(tmp_path, checkpoint, meta, torch.bfloat16, quantize=False)
    assert model.weight_bytes <= estimate < 2 * checkpoint.config.num_parameters * 1.3


@pytest.mark.parametrize(("name", "family"), [("awq", "llama"), ("gptq", "qwen3-moe")])
def test_logits_match_transformers(name: str, family: str, tmp_path: Path) -> None:
    meant = write(tmp_path, name, family)
    checkpoint = open_folder(tmp_path)
    weights = Float32Activations(checkpoint.weights)
    ours = PagedRunner(DecoderModel(checkpoint.config, weights, torch.device("cpu"), torch.float32))
    reference = build(family)
    reference.save_pretrained(tmp_path / "dense")
    tensors = load_file(tmp_path / "dense" / "model.safetensors")
    save_file(tensors | meant, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    with torch.inference_mode():
        theirs = type(reference).from_pretrained(tmp_path / "dense", attn_implementation="eager")(
            torch.arange(20)[None]
        )
    logits = ours.step({0: list(range(20))}).logits
    assert logits is not None
    assert relative_error(logits, theirs.logits[0]) < 1e-4


def test_other_groups_of_inputs_are_rejected(tmp_path: Path) -> None:
    write(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj."
    save_file(tensors | {f"{name}g_idx": tensors[f"{name}g_idx"].flip(0)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="desc_act"):
        open_folder(tmp_path).weights.matrix(f"{name}weight")
    del tensors[f"{name}g_idx"]
    save_file(tensors | {f"{name}scales": tensors[f"{name}scales"].repeat(2, 1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="multiples of 32"):
        open_folder(tmp_path).weights.matrix(f"{name}weight")


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (AWQ | {"version": "gemv"}, "gemv"),
        (AWQ | {"bits": 8}, "8 bits"),
        (AWQ | {"zero_point": False}, "without zero points"),
        (GPTQ | {"bits": 3}, "3 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
        (PACKED | {"config_groups": {"g": {"weights": WEIGHTS | {"num_bits": 8}}}}, "8 bits"),
        (PACKED | {"config_groups": {"g": {"weights": WEIGHTS | {"type": "float"}}}}, "float"),
        (PACKED | {"config_groups": {"g": {"weights": WEIGHTS | {"strategy": "tensor"}}}}, "tensor"),
    ],
)
def test_other_variants_are_rejected_by_name(scheme: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        four_bit_scheme(Metadata("config.json", {"quantization_config": scheme}))
