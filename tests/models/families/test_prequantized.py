import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.quantized import quantize
from paceline.model_files.metadata import Metadata
from paceline.models.decoder.forward import DecoderModel
from paceline.models.families.prequantized import check_scheme, with_scales
from paceline.models.weights.checkpoint import Float32Activations
from paceline.models.weights.safetensors import open_folder
from tests.models.paged import PagedRunner, relative_error
from tests.models.tiny import build

CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": CHANNEL}},
    "ignore": ["lm_head"],
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """float8 values and one scale per block of 128 x 128."""
    outputs, inputs = values.shape
    scale = torch.empty(-(-outputs // 128), -(-inputs // 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            scale[i, j] = values[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].abs().max() / 448
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:outputs, :inputs]
    return (values / wide).to(torch.float8_e4m3fn), scale


def write(folder: Path, scheme: dict[str, Any], scales: str) -> dict[str, Tensor]:
    """Write a quantised folder of a tiny model. Returns the dequantised matrices."""
    build("llama").save_pretrained(folder)
    tensors, meant = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        if scales == "blocks":
            values, scale = blocks(tensors[name])
            meant[name] = with_scales(name, values, scale).dequantize()
            tensors[name], tensors[f"{name}_scale_inv"] = values, scale
            continue
        weight = quantize(tensors[name], "int8" if scales == "int8" else "fp8")
        scale = weight.scales
        if scales == "tensor":
            one = tensors[name].abs().max().reshape(1) / 448
            weight = with_scales(name, (tensors[name] / one).to(torch.float8_e4m3fn), one)
            scale = one
        tensors[name], tensors[f"{name}_scale"] = weight.values, scale.contiguous()
        tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
        meant[name] = weight.dequantize()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    return meant


@pytest.mark.parametrize(
    ("scheme", "scales"), [(COMPRESSED, "channel"), (COMPRESSED, "tensor"), (COMPRESSED, "int8"), (FP8, "blocks")]
)
def test_a_quantised_folder_uses_its_scales(scheme: dict[str, Any], scales: str, tmp_path: Path) -> None:
    meant = write(tmp_path, scheme, scales)
    checkpoint = open_folder(tmp_path)
    for name, values in meant.items():
        assert torch.equal(checkpoint.weights.matrix(name).dequantize(), values), name
    weights = Float32Activations(checkpoint.weights)
    ours = PagedRunner(DecoderModel(checkpoint.config, weights, torch.device("cpu"), torch.float32))
    reference = build("llama")
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(meant.get(name, parameter))
        theirs = reference(torch.arange(20)[None]).logits[0]
    logits = ours.step({0: list(range(20))}).logits
    assert logits is not None
    assert relative_error(logits, theirs) < 1e-4


def test_blocks_at_the_edges_may_be_smaller() -> None:
    values = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    codes, scale = blocks(values)
    weight = with_scales("w", codes, scale)
    assert weight.scales.shape == (200, 3)
    assert ((weight.dequantize() - values).abs() <= values.abs().max() * 2**-4).all()
    assert torch.equal(weight.scales[199], scale[1])


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        (FP8 | {"weight_block_size": [64, 64]}, r"blocks of \[64, 64\]"),
        (FP8 | {"fmt": "e5m2"}, "e5m2"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        (COMPRESSED | {"config_groups": {"g": {"weights": CHANNEL | {"num_bits": 4}}}}, "weights of 4 bits"),
        (COMPRESSED | {"config_groups": {"g": {"weights": CHANNEL | {"strategy": "group"}}}}, "scales by 'group'"),
        (COMPRESSED | {"config_groups": {"g": {"weights": CHANNEL | {"symmetric": False}}}}, "zero points"),
    ],
)
def test_other_schemes_are_rejected_by_name(scheme: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        check_scheme(Metadata("config.json", {"quantization_config": scheme}))


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    write(tmp_path, FP8, "blocks")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=f"{name} .* has no weight_scale or weight_scale_inv"):
        open_folder(tmp_path).weights.matrix(name)
    with pytest.raises(UnsupportedModel, match="scales of shape"):
        with_scales(name, tensors["model.layers.0.mlp.up_proj.weight"], torch.ones(7))
