"""8-bit weights in safetensors folders: values, and a tensor of scales.

    compressed-tensors    X.weight int8 or float8_e4m3fn, X.weight_scale of the tensor, of each output, or of 128 x 128 blocks
    fp8                   X.weight float8_e4m3fn, X.weight_scale_inv of 128 x 128 blocks (a factor, despite its name)

Scales of activations are ignored: activations are not quantised.
"""

from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.quantized import GROUP, LARGEST, QuantizedWeight
from paceline.models.metadata import Metadata

SCALES = ("weight_scale", "weight_scale_inv")
DTYPES = tuple(LARGEST)
_BLOCK = [GROUP, GROUP]
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")


def check_scheme(fields: Metadata) -> None:
    """Raise `UnsupportedModel` for a `quantization_config` of config.json that is not supported."""
    if "quantization_config" not in fields:
        return
    config = fields.section("quantization_config")
    method = config.raw("quant_method")
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
            "and compressed-tensors (scales of the tensor, of each output, or of such blocks); use the original weights with "
            "the option `quantization`"
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
