"""Llama: one dense feed-forward layer of silu(gate) * up."""

from paceline.models.families.fields import Fields
from paceline.models.families.registry import family
from paceline.models.families.spec import DecoderSpec


@family("llama", gguf="llama", has_adjacent_pairs=True)
def llama(fields: Fields) -> DecoderSpec:
    fields.require_plain()
    return fields.decoder(fields.heads(), fields.dense())
