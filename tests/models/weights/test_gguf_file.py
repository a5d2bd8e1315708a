"""GGUF files of the reference writer, from tiny transformers models, and every tensor type against the reference."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import PreTrainedModel

from paceline.core.errors import UnsupportedModel
from paceline.kernels.rope import Llama3Scaling, YarnScaling
from paceline.model_files.hub import find_checkpoint
from paceline.model_files.metadata import GGUFReader
from paceline.models.decoder.forward import DecoderModel
from paceline.models.families.registry import families
from paceline.models.families.rope import rope_from_hf
from paceline.models.weights.checkpoint import Float32Activations
from paceline.models.weights.gguf import open_gguf
from paceline.models.weights.gguf_types import num_bytes, unpack
from tests.models.paged import PagedRunner, relative_error
from tests.models.tiny import build, uncounted_weights

IDS = torch.randint(0, 160, (1, 20), generator=torch.Generator().manual_seed(1))
_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OLMO_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GLM_MOE_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.gate.e_score_correction_bias": "exp_probs_b",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
_NAMES_OF = {
    "glm4_moe": _NAMES | _GLM_MOE_NAMES,
    **dict.fromkeys(("gemma2", "gemma3_text"), _NAMES | _GEMMA_NAMES),
    **dict.fromkeys(("olmo2", "olmo3"), _NAMES | _OLMO_NAMES),
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _gguf_name(name: str, family: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, _, layer, *middle, kind = name.split(".") if not name.endswith("_bias") else (*name.split("."), "bias")
    return f"blk.{layer}.{_NAMES_OF.get(family, _NAMES)['.'.join(middle)]}.{kind}"


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    """The weights of `model` under the names and in the form of a GGUF file."""
    config = model.config
    family = families()[config.model_type]
    is_permuted = family.has_adjacent_pairs and not family.stored.has_adjacent_pairs
    head_dim = model.model.layers[0].self_attn.head_dim
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if is_permuted and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = values.reshape(-1, 2, head_dim // 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if family.stored.norms == "w - 1" and name.endswith("norm.weight"):
            values = values + 1
        if ".mlp.experts." in name:
            layer, parts = name.split(".")[2], ("down",) if name.endswith("down_proj") else ("gate", "up")
            for part, rows in zip(parts, np.split(values, len(parts), 1), strict=True):
                yield f"blk.{layer}.ffn_{part}_exps.weight", np.ascontiguousarray(rows)
            continue
        yield _gguf_name(name, config.model_type), np.ascontiguousarray(values)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: Type = Type.F32,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    **fields: int | float,
) -> None:
    """Write `model` as the converter of llama.cpp does: adjacent rotary pairs for llama, scaling of Llama 3 as factors."""
    config = model.config
    architecture = families()[config.model_type].gguf or "olmo2"  # OLMo 3 has the name of OLMo 2
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_array("general.tags", ["a", "bc", ""])
    rope = config.to_dict()["rope_parameters"]
    theta, scaling = rope_from_hf({"rope_parameters": rope.get("full_attention", rope)})
    writer.add_rope_freq_base(theta)
    head_dim = model.model.layers[0].self_attn.head_dim
    writer.add_key_length(head_dim)
    for key, value in fields.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    if extra is not None:
        extra(writer)
    if isinstance(scaling, YarnScaling):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position)
        writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)
    if isinstance(scaling, Llama3Scaling):
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        writer.add_tensor("rope_freqs.weight", (frequencies / scaling(frequencies)).float().numpy())
    for name, values in _tensors(model):
        if values.ndim == 1 or kind is Type.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    if kind is not Type.F32:
        for weight in model.state_dict().values():
            if weight.dim() > 1:
                weight.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama3-rope", "qwen2", "qwen3", "smollm3"])
def test_logits_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference = build(
        family,
        **{"num_hidden_layers": 4, "no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None}
        if family == "smollm3"
        else {},
    )
    write_gguf(tmp_path / "tiny.gguf", reference)
    _check(tmp_path / "tiny.gguf", reference)


def test_a_rotary_embedding_of_a_part_of_the_head(tmp_path: Path) -> None:
    """GLM-4, whose gate and up are one tensor."""
    reference = build("glm4")
    write_gguf(tmp_path / "tiny.gguf", reference, **{"glm4.rope.dimension_count": 16})
    _check(tmp_path / "tiny.gguf", reference)


def test_fused_weights_and_two_sets_of_frequencies(tmp_path: Path) -> None:
    reference = build("phi3-longrope")

    def add_rope(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_orig_ctx_len(reference.config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(reference.model.rotary_emb.attention_scaling)
        for kind in ("short", "long"):
            factors = np.array(reference.config.rope_parameters[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)

    write_gguf(tmp_path / "tiny.gguf", reference, extra=add_rope, **{"phi3.rope.dimension_count": 8})
    _check(tmp_path / "tiny.gguf", reference)
    assert open_gguf(tmp_path / "tiny.gguf").config.max_position == 256


@pytest.mark.parametrize("family", ["olmo2", "olmo3"])
def test_olmo(family: str, tmp_path: Path) -> None:
    def add_windows(writer: gguf.GGUFWriter) -> None:
        if family == "olmo3":
            writer.add_sliding_window(8)
            writer.add_array("olmo2.attention.sliding_window_pattern", [True, False, True])

    reference = build(family)
    write_gguf(tmp_path / "tiny.gguf", reference, extra=add_windows)
    _check(tmp_path / "tiny.gguf", reference)


def test_ministral_3(tmp_path: Path) -> None:
    reference = build("ministral3")
    fields = {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.5}
    write_gguf(tmp_path / "tiny.gguf", reference, **{f"mistral3.{key}": value for key, value in fields.items()})
    _check(tmp_path / "tiny.gguf", reference)


def test_granite(tmp_path: Path) -> None:
    reference = build("granite")
    fields = {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.4, "logit_scale": 8.0}
    write_gguf(tmp_path / "tiny.gguf", reference, **{f"granite.{key}": value for key, value in fields.items()})
    _check(tmp_path / "tiny.gguf", reference)


def test_glm_4_moe(tmp_path: Path) -> None:
    """The last block is a layer of multi-token prediction, which is not read."""
    reference = build("glm4-moe")
    fields = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32, "expert_shared_count": 1}
    fields |= {"expert_weights_scale": 1.5, "leading_dense_block_count": 1, "rope.dimension_count": 16}
    fields |= {"nextn_predict_layers": 1, "expert_gating_func": 2}

    def add_prediction(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(4)
        writer.add_tensor("blk.3.nextn.eh_proj.weight", np.zeros((64, 128), np.float32))

    named = {f"glm4moe.{key}": value for key, value in fields.items()}
    write_gguf(tmp_path / "tiny.gguf", reference, extra=add_prediction, **named)
    _check(tmp_path / "tiny.gguf", reference)


def test_gemma_2(tmp_path: Path) -> None:
    """The factor of scores is not in the header."""
    caps = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
    reference = build("gemma2", query_pre_attn_scalar=32, **caps)
    fields = {"attention.sliding_window": 8, **caps}
    write_gguf(tmp_path / "tiny.gguf", reference, **{f"gemma2.{key}": value for key, value in fields.items()})
    _check(tmp_path / "tiny.gguf", reference)


def test_gemma_3(tmp_path: Path) -> None:
    """Norms are stored as w, and the header does not name the layers without a window, which are every sixth."""
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    reference = build("gemma3", num_hidden_layers=6, layer_types=kinds, rope_parameters=rope, query_pre_attn_scalar=32)
    reference.config.rope_theta = 1e6
    write_gguf(tmp_path / "tiny.gguf", reference, **{"gemma3.attention.sliding_window": 8})
    _check(tmp_path / "tiny.gguf", reference)


def test_experts(tmp_path: Path) -> None:
    reference = build("qwen3-moe")
    fields = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32}
    write_gguf(tmp_path / "tiny.gguf", reference, **{f"qwen3moe.{key}": value for key, value in fields.items()})
    _check(tmp_path / "tiny.gguf", reference)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_1], ids=lambda k: k.name)
def test_quantised_rows_of_q_and_k_are_reordered(kind: Type, tmp_path: Path) -> None:
    reference = build("llama")
    with torch.no_grad():
        write_gguf(tmp_path / "tiny.gguf", reference, kind)
    _check(tmp_path / "tiny.gguf", reference)


@torch.inference_mode()
def _check(path: Path, reference: PreTrainedModel) -> None:
    checkpoint = open_gguf(path)
    uncounted = sum(weight.numel() for _, weight in uncounted_weights(reference))
    assert checkpoint.config.num_parameters == reference.num_parameters() + uncounted
    weights = Float32Activations(checkpoint.weights)
    model = DecoderModel(checkpoint.config, weights, torch.device("cpu"), torch.float32)
    logits = PagedRunner(model).step({0: IDS[0].tolist()}).logits
    assert relative_error(logits, reference(IDS).logits[0]) < 1e-4


def test_metadata_equals_that_of_the_reference_reader(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", build("qwen2"))
    reference = gguf.GGUFReader(tmp_path / "tiny.gguf")
    reader = GGUFReader(tmp_path / "tiny.gguf")
    assert reader.metadata == {k: f.contents() for k, f in reference.fields.items() if not k.startswith("GGUF.")}
    assert {n: (t.shape, t.type, t.offset) for n, t in reader.tensors.items()} == {
        t.name: (tuple(t.shape[::-1].tolist()), int(t.tensor_type), t.data_offset) for t in reference.tensors
    }


def write_split(folder: Path, model: PreTrainedModel, numbers: tuple[int, int] = (0, 1)) -> list[Path]:
    """The model in two files, the second of which has the layers."""
    write_gguf(folder / "whole.gguf", model)
    whole = gguf.GGUFReader(folder / "whole.gguf")
    paths = [folder / f"tiny-0000{number}-of-00002.gguf" for number in (1, 2)]
    for path, number in zip(paths, numbers, strict=True):
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in {"split.no": number, "split.count": 2, "split.tensors.count": len(whole.tensors)}.items():
            writer.add_uint32(key, value)
        for field in whole.fields.values() if path == paths[0] else ():
            if field.name.startswith("llama."):
                add = writer.add_float32 if isinstance(field.contents(), float) else writer.add_uint32
                add(field.name, field.contents())
        for tensor in whole.tensors:
            if tensor.name.startswith("blk.") == (path == paths[1]):
                writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    (folder / "whole.gguf").unlink()
    return paths


def test_a_split_file_is_read_from_any_of_its_parts(tmp_path: Path) -> None:
    reference = build("llama")
    paths = write_split(tmp_path, reference)
    for path in paths:
        _check(path, reference)
    assert open_gguf(paths[0]).files == tuple(paths)
    assert find_checkpoint(tmp_path) == find_checkpoint(paths[1]) == paths[0]


def test_parts_that_are_missing_or_renamed_are_named(tmp_path: Path) -> None:
    paths = write_split(tmp_path, build("llama"), numbers=(0, 0))
    with pytest.raises(UnsupportedModel, match=r"00002-of-00002.gguf says that it is part 1 of 2, and not 2 of 2"):
        open_gguf(paths[0])
    paths[1].unlink()
    with pytest.raises(UnsupportedModel, match=r"lacks tiny-00002-of-00002\.gguf"):
        open_gguf(paths[0])
    write_gguf(tmp_path / "tiny.gguf", build("llama"), **{"split.count": 2})
    with pytest.raises(UnsupportedModel, match="part 1 of 2, and not 1 of 1"):
        open_gguf(tmp_path / "tiny.gguf")


def test_truncated_files_are_rejected(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", build("llama"))
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "header.gguf").write_bytes(whole[:300])
    with pytest.raises(UnsupportedModel, match="download it again"):
        open_gguf(tmp_path / "header.gguf")
    (tmp_path / "body.gguf").write_bytes(whole[:-5000])
    with pytest.raises(UnsupportedModel, match="shorter than its header states"):
        open_gguf(tmp_path / "body.gguf")
    (tmp_path / "other.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(UnsupportedModel, match="not a little-endian GGUF"):
        open_gguf(tmp_path / "other.gguf")


@pytest.mark.parametrize("at", [8, 16], ids=["tensors", "fields"])
def test_a_count_of_2_to_the_40_is_rejected_at_once(at: int, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", build("llama"))
    data = bytearray((tmp_path / "tiny.gguf").read_bytes())
    data[at : at + 8] = (1 << 40).to_bytes(8, "little")
    (tmp_path / "tiny.gguf").write_bytes(data)
    with pytest.raises(UnsupportedModel, match="1099511627776"):
        open_gguf(tmp_path / "tiny.gguf")


def test_an_array_of_2_to_the_40_items_is_rejected_at_once(tmp_path: Path) -> None:
    name = b"general.tags"
    write_gguf(tmp_path / "tiny.gguf", build("llama"))
    data = bytearray((tmp_path / "tiny.gguf").read_bytes())
    at = data.index(name) + len(name) + 8
    data[at : at + 8] = (1 << 40).to_bytes(8, "little")
    (tmp_path / "tiny.gguf").write_bytes(data)
    with pytest.raises(UnsupportedModel, match="arrays of more than"):
        open_gguf(tmp_path / "tiny.gguf")


def _renamed(path: Path, old: bytes, new: bytes) -> Path:
    """The file with a name of the same length replaced in its header."""
    assert len(old) == len(new)
    write_gguf(path, build("llama"))
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"blk.1.ffn_up.weight", b"blk.1.ffn_zz.weight", "the tensor blk.1.ffn_zz.weight belongs to no supported"),
        (
            b"blk.1.attn_norm.weight",
            b"blk.7.attn_norm.weight",
            r"the tensor blk.1.attn_norm.weight .model.layers.1.input_layernorm.weight. is missing.* download it again",
        ),
    ],
)
def test_refusals_name_the_file_and_the_tensor(tmp_path: Path, old: bytes, new: bytes, words: str) -> None:
    path = _renamed(tmp_path / "tiny.gguf", old, new)
    with pytest.raises(UnsupportedModel, match=words) as caught:
        open_gguf(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("name", "words"),
    [("gpt-oss", "use the folder with config.json"), ("rwkv7", "use a model of one of these.*mistral")],
)
def test_an_unknown_architecture_names_the_file_and_what_to_do(tmp_path: Path, name: str, words: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", name)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=rf"other.gguf: architecture '{name}' is not supported.*{words}"):
        open_gguf(tmp_path / "other.gguf")


def test_an_unsupported_type_names_the_file_the_tensor_and_usable_files(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", build("llama"), Type.Q8_0)
    data = bytearray((tmp_path / "tiny.gguf").read_bytes())
    at = data.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 2 * 8
    assert data[at] == Type.Q8_0
    data[at] = Type.Q8_1
    (tmp_path / "tiny.gguf").write_bytes(data)
    words = r"tiny.gguf: the tensor blk.0.ffn_up.weight has the type Q8_1; 1 of \d+ tensors .* Q4_K_M, Q5_K_M"
    with pytest.raises(UnsupportedModel, match=words):
        open_gguf(tmp_path / "tiny.gguf")


ROWS, COLUMNS = 6, 512


_SCALES = {
    **dict.fromkeys((Type.Q4_K, Type.Q5_K), (0, 2)),
    Type.Q6_K: (-2,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.TQ1_0: (52,),
    Type.TQ2_0: (64,),
    **{Type[name]: (0,) for name in ["IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"]},
    Type.IQ1_M: (),
}
"""Where a block has half-precision numbers, of types that the reference does not quantise to."""


def _stored(kind: Type) -> np.ndarray:
    """[ROWS, bytes] of a valid tensor: quantised by the reference if it supports that, otherwise random blocks."""
    random = np.random.default_rng(0)
    if kind not in _SCALES:
        values = random.normal(size=(ROWS, COLUMNS)).astype(np.float32)
        return gguf.quants.quantize(values, kind).view(np.uint8).reshape(ROWS, -1)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (ROWS * COLUMNS // block, size), dtype=np.uint8)
    for at in _SCALES[kind]:
        start = at % size
        blocks[:, start : start + 2] = random.normal(size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
    if kind is Type.IQ1_M:  # its scale is the high half of every second byte: 0x3c00 is 1
        blocks[:, 49::2] = (blocks[:, 49::2] & 15) | np.array([0x0, 0x0, 0xC0, 0x30], np.uint8)
    return blocks.reshape(ROWS, -1)


SUPPORTED = (
    *(Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1),
    *_SCALES,
)


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
def test_unpacking_is_exact(kind: Type) -> None:
    stored = _stored(kind)
    assert num_bytes(kind, ROWS * COLUMNS) == stored.size
    raw = stored.view(np.float16) if kind is Type.F16 else stored.view(np.float32) if kind is Type.F32 else stored
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind).reshape(ROWS, COLUMNS))
    weight = unpack(kind, torch.from_numpy(stored).flatten(), (ROWS, COLUMNS))
    assert torch.equal(weight.dequantize(), expected)


def test_a_type_that_the_package_gguf_reads_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedModel, match=r"IQ4_NL .*: pip install gguf"):
        unpack(Type.IQ4_NL, torch.zeros(18, dtype=torch.uint8), (1, 32))


@pytest.mark.parametrize("kind", [Type.Q8_1, Type.MXFP4], ids=lambda k: k.name)
def test_other_tensor_types_are_rejected_by_name(kind: Type) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{kind.name} .*Q4_1.*Q6_K"):
        num_bytes(kind, 256)
