"""Mistral: Llama with an optional window in all layers. Its GGUF files have the name llama."""

from paceline.models.families.fields import Fields
from paceline.models.families.registry import family
from paceline.models.families.spec import DecoderSpec


@family("mistral", defaults={"sliding_window": 4096})
def mistral(fields: Fields) -> DecoderSpec:
    fields.require_plain()
    has_window = "sliding_window" in fields.values
    windows = [fields.window()] * fields.num_layers if has_window else None
    return fields.decoder(fields.heads(), fields.dense(), windows)
