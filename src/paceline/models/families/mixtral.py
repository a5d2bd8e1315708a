"""Mixtral: Mistral with routed experts, whose weights add up to 1."""

from paceline.models.families.fields import Fields
from paceline.models.families.registry import StoredForm, family
from paceline.models.families.spec import DecoderSpec

_NAMES = ((".mlp.", ".block_sparse_moe."), (".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3."))


@family("mixtral", stored=StoredForm(renamed=_NAMES), defaults={"num_local_experts": 8, "num_experts_per_tok": 2})
def mixtral(fields: Fields) -> DecoderSpec:
    fields.require_plain(has_experts=True)
    windows = [fields.window()] * fields.num_layers if "sliding_window" in fields.values else None
    return fields.decoder(fields.heads(), fields.experts(), windows, (fields.rotary(1e6),))
