"""Quantisation schemes of safetensors folders, and 8-bit weights: values, and a tensor of scales.

    compressed-tensors    X.weight int8 or float8_e4m3fn, X.weight_scale of the tensor, of each output, or of 128 x 128 blocks
    fp8                   X.weight float8_e4m3fn, X.weight_scale_inv of 128 x 128 blocks (a factor, despite its name)

`formats/four_bit.py` reads 4-bit weights. Scales of activations are ignored: activations are not quantised.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.quantized import GROUP, LARGEST, QuantizedWeight
from paceline.model_files import Metadata

SCALES = ("weight_scale", "weight_scale_inv")
DTYPES = tuple(LARGEST)
_BLOCK = [GROUP, GROUP]
Method = Literal["awq", "gptq", "compressed-tensors"]
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class FourBitScheme:
    method: Method
    zero_offset: int = 0
    """What is added to a stored zero: 1 for the first format of GPTQ."""


def four_bit_scheme(fields: Metadata) -> FourBitScheme | None:
    """The scheme of config.json; None if its weights do not have 4 bits. Raises `UnsupportedModel` for an unknown variant."""
    config = fields.section("quantization_config")
    method = config.raw("quant_method")
    if method == "awq":
        _require_four_bit(config.raw("bits") == 4, f"AWQ of {config.raw('bits')!r} bits")
        _require_four_bit(
            config.text("version", "gemm").lower() == "gemm", f"AWQ of the version {config.raw('version')!r}"
        )
        _require_four_bit(config.flag("zero_point", True), "AWQ without zero points")
        return FourBitScheme("awq")
    if method == "gptq":
        _require_four_bit(config.raw("bits") == 4, f"GPTQ of {config.raw('bits')!r} bits")
        layout = config.text("checkpoint_format", "gptq")
        _require_four_bit(layout in ("gptq", "gptq_v2"), f"GPTQ of the format {layout!r}")
        return FourBitScheme("gptq", zero_offset=1 if layout == "gptq" else 0)
    if method == "compressed-tensors" and config.raw("format") == "pack-quantized":
        for group in config.section("config_groups").sections():
            weights = group.section("weights")
            _require_four_bit(weights.raw("num_bits") == 4, f"packed weights of {weights.raw('num_bits')!r} bits")
            _require_four_bit(
                weights.text("type", "int") == "int", f"packed weights of the type {weights.raw('type')!r}"
            )
            strategy = weights.raw("strategy")
            _require_four_bit(strategy in ("group", "channel"), f"packed weights with scales by {strategy!r}")
        return FourBitScheme("compressed-tensors")
    return None


def _require_four_bit(is_supported: bool, found: str) -> None:
    if not is_supported:
        raise UnsupportedModel(
            f"config.json has quantization_config with {found:.200}: supported are 4-bit AWQ (version gemm), GPTQ and "
            "compressed-tensors (pack-quantized integers, scales by group or channel)"
        )


def check_scheme(fields: Metadata) -> None:
    """Raise `UnsupportedModel` for a `quantization_config` of config.json that is not supported."""
    if "quantization_config" not in fields:
        return
    config = fields.section("quantization_config")
    method = config.raw("quant_method")
    if (method == "mxfp4" and fields.raw("model_type") == "gpt_oss") or four_bit_scheme(fields) is not None:
        return
    if method == "fp8":
        _require(config.text("fmt", "e4m3") == "e4m3", f"fp8 of the format {config.raw('fmt')!r}")
        _require(config.raw("weight_block_size") in (None, _BLOCK), f"blocks of {config.raw('weight_block_size')}")
    elif method == "compressed-tensors":
        found = config.raw("format")
        _require(found in _FORMATS, f"compressed-tensors of the format {found!r}")
        for group in config.section("config_groups").sections():
            _check_group(group.section("weights"))
    else:
        _require(False, f"quant_method {method!r}")


def _check_group(weights: Metadata) -> None:
    _require(weights.raw("num_bits") == 8, f"weights of {weights.raw('num_bits')} bits")
    _require(weights.flag("symmetric", True), "weights with zero points")
    strategy = weights.raw("strategy")
    _require(strategy in ("tensor", "channel", "block"), f"scales by {strategy!r}")
    if strategy == "block":
        _require(weights.raw("block_structure") == _BLOCK, f"blocks of {weights.raw('block_structure')}")


def _require(is_supported: bool, found: str) -> None:
    if not is_supported:
        raise UnsupportedModel(
            f"config.json has quantization_config with {found:.200}: supported are 8-bit weights of fp8 (blocks of {_BLOCK}) "
            "and compressed-tensors (scales of the tensor, of each output, or of such blocks), 4-bit weights of AWQ, GPTQ and "
            "compressed-tensors, and MXFP4 of gpt-oss; use the original weights with the option `quantization`"
        )


def with_scales(name: str, values: Tensor, scale: Tensor) -> QuantizedWeight:
    """values [N, K]; scale of the whole matrix, [N] or [N, 1], or [ceil(N / 128), ceil(K / 128)]."""
    if values.dim() != 2:
        raise UnsupportedModel(f"{name} has the shape {tuple(values.shape)}: expected a matrix")
    outputs, inputs = values.shape
    blocks = (-(-outputs // GROUP), -(-inputs // GROUP))
    scale = scale.float()
    if scale.numel() == 1:
        scales = scale.reshape(1, 1).expand(outputs, 1)
    elif scale.shape in ((outputs,), (outputs, 1)):
        scales = scale.reshape(outputs, 1)
    elif scale.shape == blocks:
        scales = scale.repeat_interleave(GROUP, 0)[:outputs]
    else:
        raise UnsupportedModel(f"{name} of shape {tuple(values.shape)} has scales of shape {tuple(scale.shape)}")
    return QuantizedWeight(values, scales.contiguous())
