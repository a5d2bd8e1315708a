"""Ministral 3: Mistral whose queries grow with the position, so that a text beyond the original context stays in focus."""

from paceline.models.families.fields import Fields
from paceline.models.families.registry import family
from paceline.models.families.spec import DecoderSpec


@family("ministral3", gguf="mistral3", has_adjacent_pairs=True, defaults={"head_dim": 128, "rms_norm_eps": 1e-5})
def ministral3(fields: Fields) -> DecoderSpec:
    fields.require_plain()
    windows = [fields.window()] * fields.num_layers if fields.has_window() else None
    return fields.decoder(fields.heads(query_scale=fields.query_scale()), fields.dense(), windows)
