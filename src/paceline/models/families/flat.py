"""A short way to write the description of a model down: the arguments of one function."""

from paceline.kernels.formats.activation import Activation
from paceline.kernels.rope import RopeScaling
from paceline.models.families.layers import DenseFeedForward, FeedForward, Heads, Rotary, RoutedExperts, make_layers
from paceline.models.families.spec import DecoderSpec


def flat_spec(
    architecture: str,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    ffn_size: int,
    rms_eps: float,
    rope_theta: float,
    max_position: int,
    rope_scaling: RopeScaling | None = None,
    tie_embeddings: bool = False,
    attention_bias: bool = False,
    qk_norm: bool = False,
    sliding_window: int | None = None,
    full_layers: tuple[int, ...] = (),
    local_rope_theta: float | None = None,
    attention_scale: float | None = None,
    has_sinks: bool = False,
    has_output_norms: bool = False,
    embedding_scale: float = 1.0,
    activation: Activation = "silu",
    output_bias: bool = False,
    num_experts: int = 0,
    experts_per_token: int = 0,
    normalizes_experts: bool = True,
    bos_id: int | None = None,
    eos_ids: tuple[int, ...] = (),
) -> DecoderSpec:
    """A model whose layers are alike but for their window, which `full_layers` do not have. Layers with a window use
    `local_rope_theta` without scaling, unless it is None. `output_bias` is that of attention, the router and the experts."""
    heads = Heads(num_heads, num_kv_heads, head_dim, attention_scale, attention_bias, output_bias, qk_norm, has_sinks)
    ffn: FeedForward = DenseFeedForward(ffn_size, activation)
    if num_experts:
        ffn = RoutedExperts(num_experts, experts_per_token, ffn_size, activation, normalizes_experts, output_bias)
    rotary = [Rotary(head_dim, rope_theta, rope_scaling)]
    if local_rope_theta is not None:
        rotary.append(Rotary(head_dim, local_rope_theta))
    windows = [None if number in full_layers else sliding_window for number in range(num_layers)]
    layer_rotary = [int(len(rotary) > 1 and window is not None) for window in windows]
    return DecoderSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        rms_eps=rms_eps,
        max_position=max_position,
        rotary=tuple(rotary),
        layers=make_layers(heads, ffn, "pre_and_post" if has_output_norms else "pre", windows, layer_rotary),
        tie_embeddings=tie_embeddings,
        embedding_scale=embedding_scale,
        bos_id=bos_id,
        eos_ids=eos_ids,
    )
