"""8-bit weights in safetensors folders: values, and a tensor of scales.

    compressed-tensors    X.weight int8 or float8_e4m3fn, X.weight_scale of the tensor, of each output, or of 128 x 128 blocks
    fp8                   X.weight float8_e4m3fn, X.weight_scale_inv of 128 x 128 blocks (a factor, despite its name)

Scales of activations are ignored: activations are not quantised.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.quantized import GROUP, LARGEST, QuantizedWeight

SCALES = ("weight_scale", "weight_scale_inv")
DTYPES = tuple(LARGEST)
_BLOCK = [GROUP, GROUP]
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")


def check_scheme(config: Mapping[str, Any] | None) -> None:
    """Raise `UnsupportedModel` for a `quantization_config` of config.json that is not supported."""
    if config is None:
        return
    method = config.get("quant_method")
    if method == "fp8":
        _require(config.get("fmt", "e4m3") == "e4m3", f"fp8 of the format {config.get('fmt')!r}")
        _require(config.get("weight_block_size") in (None, _BLOCK), f"blocks of {config.get('weight_block_size')}")
    elif method == "compressed-tensors":
        found = config.get("format")
        _require(found in _FORMATS, f"compressed-tensors of the format {found!r}")
        for group in config.get("config_groups", {}).values():
            _check_group(group.get("weights") or {})
    else:
        _require(False, f"quant_method {method!r}")


def _check_group(weights: Mapping[str, Any]) -> None:
    _require(weights.get("num_bits") == 8, f"weights of {weights.get('num_bits')} bits")
    _require(weights.get("symmetric", True), "weights with zero points")
    strategy = weights.get("strategy")
    _require(strategy in ("tensor", "channel", "block"), f"scales by {strategy!r}")
    if strategy == "block":
        _require(weights.get("block_structure") == _BLOCK, f"blocks of {weights.get('block_structure')}")


def _require(is_supported: bool, found: str) -> None:
    if not is_supported:
        raise UnsupportedModel(
            f"config.json has quantization_config with {found}: supported are 8-bit weights of fp8 (blocks of {_BLOCK}) and "
            "compressed-tensors (scales of the tensor, of each output, or of such blocks); use the original weights with "
            "the option `quantization`"
        )


def with_scales(name: str, values: Tensor, scale: Tensor) -> QuantizedWeight:
    """values [N, K]; scale of the whole matrix, [N] or [N, 1], or [ceil(N / 128), ceil(K / 128)]."""
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
