import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.tools.train.drafts import EagleDraft, add_lora, default_capture, merge_lora, unrolled_mask, widen
from paceline.tools.train.layers import LayerShape
from paceline.tools.train.target import States, Target
from tests.tools.train.tiny import some_states

CAPTURE = (1, 2, 3)


def new_head(target: Target) -> EagleDraft:
    torch.manual_seed(1)
    draft = EagleDraft(LayerShape.of(target.config), CAPTURE)
    draft.calibrate(target, some_states(target, CAPTURE))
    for norm in (draft.norm, draft.layers[0].hidden_norm, draft.layers[0].input_layernorm):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return draft


def one_round(draft: EagleDraft, target: Target, states: States, last: int, depth: int) -> list[Tensor]:
    """A reference inference round after token `last`, slot by slot with a cache. Returns the hidden state of every draft token.
    Row 0 of the batch only."""
    weights, layer = draft.weights(), draft.layers[0]
    features = (states.inner[0] @ weights["fc.weight"].T)[:last]  # of tokens 0 .. last-1
    keys: list[Tensor] = []
    values: list[Tensor] = []
    found: list[Tensor] = []
    feature = features[0]
    for slot in range(last + depth - 1):
        if slot < last:
            feature = features[slot]
        embedding = target.embedding[states.ids[0, slot + 1]]
        x = torch.cat([layer.input_layernorm(embedding), layer.hidden_norm(feature)])
        attention = layer.self_attn
        q, k, v = (p(x).view(-1, attention.head_dim) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        rotary = target.rotary.at(torch.tensor([slot]))
        q, k = rotary(q[:, None])[:, 0], rotary(k[:, None])[:, 0]
        keys.append(k)
        values.append(v)
        k_all, v_all = (torch.stack(part, 1).repeat_interleave(2, 0) for part in (keys, values))  # [H, slots, hd]
        scores = (q[:, None] @ k_all.transpose(1, 2)) * attention.head_dim**-0.5
        attended = (scores.softmax(-1) @ v_all)[:, 0].flatten()
        x = feature + attention.o_proj(attended)
        feature = x + layer.mlp(layer.post_attention_layernorm(x))
        if slot >= last - 1:
            found.append(draft.norm(feature))
    return found


def test_every_depth_matches_an_inference_round(target: Target) -> None:
    draft, states = new_head(target), some_states(target, CAPTURE)
    predictions = draft.predict(target, states, 4)
    assert predictions.first == (1, 2, 3, 4)
    for last in (1, 2, 7, 19):
        for u, hidden in enumerate(one_round(draft, target, states, last, 4)):
            torch.testing.assert_close(predictions.hidden[u, 0, last + u], hidden, rtol=1e-4, atol=1e-4)


def test_mask_has_target_slots_then_one_of_each_depth() -> None:
    mask = unrolled_mask(5, 2, torch.device("cpu")).view(5, 3, 5)
    assert mask[4].nonzero().tolist() == [[0, 0], [0, 1], [0, 2], [1, 3], [2, 4]]
    assert mask[0].nonzero().tolist() == [[2, 0]]


def test_calibration_scales_channels_and_is_folded_in(target: Target) -> None:
    draft, states = new_head(target), some_states(target, CAPTURE)
    scaled = states.inner[:, 1:] * draft.feature_scale
    torch.testing.assert_close(scaled.abs().mean((0, 1)), torch.ones(96))
    weights = draft.weights()
    assert "feature_scale" not in weights
    torch.testing.assert_close(
        F.linear(states.inner, weights["fc.weight"]), draft.fc(states.inner * draft.feature_scale), rtol=1e-4, atol=1e-4
    )


def test_default_capture_is_early_middle_late() -> None:
    assert default_capture(30) == (2, 15, 27)
    assert default_capture(3) == (1, 2, 3)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_recalibration_restores_the_scales_and_keeps_predictions(target: Target, is_adapted: bool) -> None:
    trained, states = new_head(target), some_states(target, CAPTURE)
    saved = EagleDraft(trained.shape, CAPTURE)
    saved.load_state_dict({"feature_scale": torch.ones_like(trained.feature_scale), **trained.weights()})
    if is_adapted:
        add_lora(saved, 2)
    before = saved.predict(target, states, 2).hidden
    saved.recalibrate(states)
    torch.testing.assert_close(saved.predict(target, states, 2).hidden, before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(saved.feature_scale, trained.feature_scale)
    merge_lora(saved)
    torch.testing.assert_close(saved.weights()["fc.weight"], trained.weights()["fc.weight"])


def test_wider_head_predicts_the_same(target: Target) -> None:
    draft, states = new_head(target), some_states(target, CAPTURE)
    before = draft.predict(target, states, 2).hidden
    draft.shape = widen(draft, draft.shape, 80)
    assert draft.layers[0].mlp.down_proj.weight.shape == (32, 80)
    torch.testing.assert_close(draft.predict(target, states, 2).hidden, before)
    again = EagleDraft.from_settings(draft.settings() | {"hidden_size": 32, "rms_eps": 1e-5})
    again.load_state_dict(draft.state_dict())
