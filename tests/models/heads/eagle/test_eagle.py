"""The EAGLE head against plain torch: committed slots in chunks, then a branch in a lane."""

import pytest
import torch

from paceline.core.errors import UnsupportedModel
from paceline.models.heads.eagle.eagle import EagleModel, EagleRunner
from paceline.models.heads.eagle.eagle_weights import EagleConfig
from paceline.models.runner.runner import Span
from tests.fakes import tiny_model
from tests.heads import TensorWeights, draft_config, draft_tensors
from tests.models.reference_heads import eagle_logits, target_states

pytestmark = pytest.mark.usefixtures("unrounded_drafts")

IDS = [7, 3, 22, 9, 14, 39, 0, 5, 5, 8, 31, 17, 2, 6, 28, 11, 4, 13, 19]
LAST = len(IDS) - 2
"""The last slot: the state of the second newest token, joined with the newest token."""


def published(target, **extra):
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
        "draft_vocab_size": 24,
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
    shape = EagleConfig.read(published(target, norm_before_residual=normed), target.config)
    runner = EagleRunner(EagleModel(shape, TensorWeights(tensors), target), num_blocks=2, num_lanes=1)
    inner, _ = target_states(target, IDS, shape.state_layers)
    features = torch.cat([inner[layer] for layer in shape.state_layers], 1)
    model = runner.model

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
    ours = EagleConfig.read(draft_config(target, "eagle", state_layers=[0, 1, 2]), target.config)
    assert EagleConfig.read(published(target), target.config) == ours


def test_defaults_and_errors_of_the_published_layout():
    target = tiny_model()
    config = published(target)
    del config["eagle_aux_hidden_state_layer_ids"]
    assert EagleConfig.read(config, target.config).state_layers == (2, 1, -1)  # a real target has more than two layers
    with pytest.raises(UnsupportedModel, match="target has 2"):
        EagleModel(EagleConfig.read(config, target.config), TensorWeights({}), target)
    del config["norm_before_residual"]
    with pytest.raises(UnsupportedModel, match="norm_before_residual"):
        EagleConfig.read(config, target.config)
    config = published(target)
    config["transformer_layer_config"]["num_hidden_layers"] = 2
    with pytest.raises(UnsupportedModel, match="2 layers"):
        EagleConfig.read(config, target.config)


def test_a_head_may_have_its_own_tables():
    target = tiny_model()
    tensors = draft_tensors(draft_config(target, "eagle"), reduced=24)
    tensors["embed_tokens.weight"] = torch.randn(40, 32)
    tensors["lm_head.weight"] = torch.randn(24, 32)
    shape = EagleConfig.read(published(target), target.config)
    model = EagleModel(shape, TensorWeights(tensors), target)
    assert model.embedding is not target.embedding
    state = torch.randn(1, 32)
    normed = state / (state.pow(2).mean() + shape.rms_eps).sqrt() * tensors["norm.weight"]
    torch.testing.assert_close(model.logits(state), normed @ tensors["lm_head.weight"].T, rtol=1e-4, atol=1e-4)
    assert model.vocabulary.tokens(torch.tensor([0, 23])).tolist() == [0, 39]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fc", "requires a matrix of 32 x 96, and the weights have fc 32 x 95"),
        ("layers.0.self_attn.k_proj", "requires a matrix of 128 x 64, .*q_proj 64 x 64, .*k_proj 32 x 63, "),
    ],
)
def test_weights_of_another_shape_than_configured_are_rejected(name, message):
    target = tiny_model()
    tensors = draft_tensors(draft_config(target, "eagle"))
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"][:, :-1]
    with pytest.raises(UnsupportedModel, match=message):
        EagleModel(EagleConfig.read(published(target), target.config), TensorWeights(tensors), target)


@pytest.mark.parametrize("name", ["norm_before_fc", "fc_norm", "norm_output"])
def test_variants_that_change_the_function_of_a_published_head_are_refused(name):
    target = tiny_model()
    EagleConfig.read(published(target, **{name: False}), target.config)
    with pytest.raises(UnsupportedModel, match=name):
        EagleConfig.read(published(target, **{name: True}), target.config)


@pytest.mark.parametrize("change", [{"model_type": "qwen3"}, {"attention_bias": True}])
def test_a_published_layer_of_another_type_is_refused(change):
    target = tiny_model()
    config = published(target)
    config["transformer_layer_config"] |= change
    with pytest.raises(UnsupportedModel, match="supported: llama without biases"):
        EagleConfig.read(config, target.config)
