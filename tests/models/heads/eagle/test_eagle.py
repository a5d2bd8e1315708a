"""The EAGLE head against plain torch: committed slots in chunks, then a branch in a lane."""

import pytest
import torch

from paceline.models.heads.eagle.eagle import EagleRunner
from paceline.models.runner.runner import Span
from tests.fakes import tiny_model
from tests.heads import draft_config, draft_tensors, eagle_model
from tests.models.reference_heads import eagle_logits, target_states

pytestmark = pytest.mark.usefixtures("unrounded_drafts")

IDS = [7, 3, 22, 9, 14, 39, 0, 5, 5, 8, 31, 17, 2, 6, 28, 11, 4, 13, 19]
LAST = len(IDS) - 2
"""The last slot: the state of the second newest token, joined with the newest token."""


def published(target, reduced=24, **extra):
    """config.json as `speculators` writes it."""
    c = target.config
    layer = {
        "hidden_size": c.hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "rms_norm_eps": c.rms_eps,
        "rope_theta": 10_000.0,
        "vocab_size": c.vocab_size,
        "model_type": "llama",
    }
    return {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": reduced or c.vocab_size,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        **extra,
    }


@pytest.mark.parametrize("reduced", [None, 24])
@pytest.mark.parametrize("normed", [False, True])
def test_a_chain_equals_the_reference(reduced, normed):
    target = tiny_model()
    ours = draft_config(target, "eagle")
    tensors = draft_tensors(ours, reduced=reduced)
    model = eagle_model(published(target, reduced, norm_before_residual=normed), tensors, target, "speculators")
    runner = EagleRunner(model, num_blocks=2, num_lanes=1)
    layers = model.config.state_layers
    inner, _ = target_states(target, IDS, layers)
    features = torch.cat([inner[layer] for layer in layers], 1)

    def fused(rows):
        return model.fuse({layer: states[rows] for layer, states in inner.items()})

    with torch.inference_mode():
        runner.forward([Span([0, 1], 0, IDS[1:11], 0)], fused(slice(0, 10)))
        state = runner.forward([Span([0, 1], 10, IDS[11:], 0)], fused(slice(10, LAST + 1)))[-1:]
        runner.copy([1], runner.lane(0)[:1])
        path = []
        for step in range(6):
            expected = eagle_logits(
                tensors, ours, target, features[: LAST + 1], range(LAST + 1), IDS, path, norm_before_residual=normed
            )
            torch.testing.assert_close(model.logits(state)[0], expected, rtol=1e-3, atol=1e-3)
            path.append((7 * step + 1) % 40)
            span = Span([0, *runner.lane(0)], LAST + 1 + step, path[-1:], 0)
            state = runner.forward([span], state)


def test_both_layouts_give_the_same_config():
    target = tiny_model()
    config = draft_config(target, "eagle")
    ours, theirs = (
        eagle_model(layout, draft_tensors(config), target, form)
        for layout, form in ((config, "paceline"), (published(target), "speculators"))
    )
    assert ours.config == theirs.config


def test_a_head_may_have_its_own_tables():
    target = tiny_model()
    tensors = draft_tensors(draft_config(target, "eagle"), reduced=24)
    tensors["embed_tokens.weight"] = torch.randn(40, 32)
    tensors["lm_head.weight"] = torch.randn(24, 32)
    model = eagle_model(published(target), tensors, target, "speculators")
    assert model.embedding is not target.embedding
    state = torch.randn(1, 32)
    normed = state / (state.pow(2).mean() + model.config.rms_eps).sqrt() * tensors["norm.weight"]
    torch.testing.assert_close(model.logits(state), normed @ tensors["lm_head.weight"].T, rtol=1e-4, atol=1e-4)
    assert model.vocabulary.tokens(torch.tensor([0, 23])).tolist() == [0, 39]
