import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.weights import Dense, Grouped
from paceline.models.decoder.forward import DecoderModel
from paceline.models.weights.checkpoint import Float32Activations
from paceline.models.weights.family_weights import unpack_mxfp4
from paceline.models.weights.safetensors import open_folder
from tests.models.paged import PagedRunner, relative_error
from tests.models.tiny import build

IDS = torch.randint(0, 160, (1, 24), generator=torch.Generator().manual_seed(1))


def random_blocks(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(119, 125, shape, dtype=torch.uint8, generator=generator)


def test_mxfp4_is_unpacked_exactly_as_transformers_does() -> None:
    blocks, scales = random_blocks(3, 8, 5)
    scales[0, 0], scales[0, 1] = 1, 250
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)  # [E, N, K]
    for expert in range(3):
        weight = unpack_mxfp4(blocks[expert], scales[expert])
        assert weight.codes.dtype is torch.int8
        assert torch.equal(weight.dequantize(), expected[expert])
    with pytest.raises(UnsupportedModel, match="do not match"):
        unpack_mxfp4(blocks[0], scales[0, :2])


@torch.inference_mode()
def test_gpt_oss_in_mxfp4_matches_transformers(tmp_path: Path) -> None:
    reference, folder = build("gpt-oss"), tmp_path / "mxfp4"
    reference.save_pretrained(tmp_path / "dense")
    reference.save_pretrained(folder)
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    tensors = dict(dense)
    for name in [name for name in dense if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks, scales = random_blocks(experts, outputs, inputs // 32)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(dense, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))

    checkpoint = open_folder(folder)
    assert isinstance(checkpoint.weights.matrix("model.layers.0.mlp.experts.2.up_proj.weight"), Grouped)
    model = DecoderModel(checkpoint.config, Float32Activations(checkpoint.weights), torch.device("cpu"), torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", attn_implementation="eager")(IDS).logits[0]
    logits = PagedRunner(model).step({0: IDS[0].tolist()}).logits
    assert logits is not None
    assert relative_error(logits, theirs) < 1e-4


def test_gate_and_up_of_gpt_oss_are_separated(tmp_path: Path) -> None:
    reference = build("gpt-oss")
    reference.save_pretrained(tmp_path)
    weights, experts = open_folder(tmp_path).weights, reference.model.layers[1].mlp.experts
    matrix = weights.matrix("model.layers.1.mlp.experts.5.up_proj.weight")
    assert isinstance(matrix, Dense)
    assert torch.equal(matrix.values, experts.gate_up_proj[5, :, 1::2].t())
    gate = weights.vector("model.layers.1.mlp.experts.5.gate_proj.bias")
    assert torch.equal(gate, experts.gate_up_proj_bias[5, ::2])
    assert torch.equal(weights.vector("model.layers.1.mlp.gate.bias"), reference.model.layers[1].mlp.router.bias)
