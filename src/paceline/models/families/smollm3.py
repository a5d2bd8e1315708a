"""SmolLM3: Llama, with every fourth layer without a rotary embedding."""

from paceline.models.families.fields import Fields
from paceline.models.families.layers import Rotary
from paceline.models.families.registry import family
from paceline.models.families.spec import DecoderSpec

_PERIOD = 4
"""Every fourth layer has no rotary embedding if the file does not list them; GGUF files never do."""


@family("smollm3", gguf="smollm3", has_adjacent_pairs=True, defaults={"tie_word_embeddings": True})
def smollm3(fields: Fields) -> DecoderSpec:
    fields.require_plain()
    fields.require(("use_sliding_window", False, "a sliding window in this family"))
    has_rotary = [int((number + 1) % _PERIOD != 0) for number in range(fields.num_layers)]
    if "no_rope_layers" in fields.values:  # despite its name, 1 is a layer with a rotary embedding
        has_rotary = fields.values.array("no_rope_layers", int, fields.num_layers)
    return fields.decoder(
        fields.heads(),
        fields.dense(),
        rotary=(fields.rotary(2e6), Rotary(fields.head_dim, 1.0, num_rotated=0)),
        layer_rotary=[0 if turns else 1 for turns in has_rotary],
    )
