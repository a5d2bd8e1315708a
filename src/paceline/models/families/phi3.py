"""Phi-3 and Phi-4: Llama with fused weights, and a rotary embedding of a part of the head in some sizes.

Models with `longrope` have two sets of frequencies, one for texts up to the original context and one for longer texts. A longer
text would need all its cached keys again with the other set, so that the served context ends at the original one.
"""

from dataclasses import replace

from paceline.models.families.fields import Fields
from paceline.models.families.registry import StoredForm, family
from paceline.models.families.spec import DecoderSpec


@family("phi3", gguf="phi3", stored=StoredForm(is_fused=True), defaults={"original_max_position_embeddings": 4096})
def phi3(fields: Fields) -> DecoderSpec:
    fields.require_plain(has_partial_rotary=True)
    windows = [fields.window()] * fields.num_layers if "sliding_window" in fields.values else None
    rotary = fields.partial_rotary(1.0)
    spec = fields.decoder(fields.heads(), fields.dense(), windows, (rotary,))
    if rotary.scaling is None:
        return spec
    return replace(spec, max_position=min(spec.max_position, fields.original_positions()))
