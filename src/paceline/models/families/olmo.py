"""OLMo 2 and 3: norms at the outputs of the parts of a layer only, and of all heads of q and k together.

OLMo 3 has a window in three of four layers; the scaling of its rotary embedding is that of the other layers alone.
"""

from paceline.models.families.fields import Fields
from paceline.models.families.registry import family
from paceline.models.families.spec import DecoderSpec

_PERIOD = 4
"""Every fourth layer has no window if the file does not list them."""


@family("olmo2", gguf="olmo2", defaults={"rms_norm_eps": 1e-5})
def olmo2(fields: Fields) -> DecoderSpec:
    """GGUF files of OLMo 3 have the name olmo2."""
    if fields.has_window():
        return olmo3(fields)
    fields.require_plain()
    return fields.decoder(fields.heads(has_joined_qk_norm=True), fields.dense(), norms="post")


@family("olmo3", defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096})
def olmo3(fields: Fields) -> DecoderSpec:
    fields.require_plain()
    return fields.decoder(
        fields.heads(has_joined_qk_norm=True),
        fields.dense(),
        fields.windows(range(_PERIOD - 1, fields.num_layers, _PERIOD)),
        fields.rotary_by_window(5e5),
        norms="post",
    )
