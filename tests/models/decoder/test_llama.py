"""The decoder against transformers: equal logits from equal weights, for any chunks of a sequence."""

import pytest
import torch
from transformers import PreTrainedModel

from paceline.models.decoder.forward import DecoderModel
from paceline.models.weights.safetensors import open_folder
from tests.models.paged import PagedRunner, relative_error
from tests.models.tiny import FAMILIES, build, uncounted_weights

TOLERANCE = 1e-4
IDS = torch.randint(0, 160, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, DecoderModel]:
    reference = build(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    checkpoint = open_folder(folder)
    uncounted = sum(weight.numel() for _, weight in uncounted_weights(reference))
    assert checkpoint.config.num_parameters == reference.num_parameters() + uncounted
    return reference, DecoderModel(checkpoint.config, checkpoint.weights, torch.device("cpu"), torch.float32)


@torch.inference_mode()
def test_prefill_matches_transformers(pair: tuple[PreTrainedModel, DecoderModel]) -> None:
    reference, model = pair
    expected = reference(IDS[:1]).logits[0]
    out = PagedRunner(model).step({0: IDS[0].tolist()})
    assert out.logits is not None
    assert out.logits.dtype == torch.float32
    assert relative_error(out.logits, expected) < TOLERANCE


@torch.inference_mode()
def test_decoding_one_token_at_a_time_matches_transformers(pair: tuple[PreTrainedModel, DecoderModel]) -> None:
    reference, model = pair
    runner = PagedRunner(model)
    rows = [runner.step({0: IDS[0, :10].tolist()}).logits]
    rows += [runner.step({0: [token]}).logits for token in IDS[0, 10:].tolist()]
    assert relative_error(torch.cat(rows), reference(IDS[:1]).logits[0]) < TOLERANCE


@torch.inference_mode()
def test_ragged_batches_match_transformers(pair: tuple[PreTrainedModel, DecoderModel]) -> None:
    """One sequence is prefilled in chunks while another decodes."""
    reference, model = pair
    runner, one, two = PagedRunner(model), IDS[0].tolist(), IDS[1].tolist()
    passes = [{0: one[:17]}, {0: one[17:18], 1: two[:5]}, {1: two[5:31], 0: one[18:21]}, {0: one[21:], 1: two[31:]}]
    rows: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for batch in passes:
        parts = runner.step(batch).logits.split([len(new) for new in batch.values()])
        for sequence, part in zip(batch, parts, strict=True):
            rows[sequence].append(part)
    expected = reference(IDS).logits
    for sequence in (0, 1):
        assert relative_error(torch.cat(rows[sequence]), expected[sequence]) < TOLERANCE


@torch.inference_mode()
def test_hidden_states_match_transformers(pair: tuple[PreTrainedModel, DecoderModel]) -> None:
    reference, model = pair
    expected = reference(IDS[:1], output_hidden_states=True).hidden_states
    out = PagedRunner(model).step({0: IDS[0].tolist()}, state_layers=(0, 1, 2, 3), last_hidden=True)
    for layer in (0, 1, 2):
        assert relative_error(out.hidden_by_layer[layer], expected[layer][0]) < TOLERANCE
    assert out.last_hidden is not None
    assert relative_error(out.last_hidden, expected[-1][0]) < TOLERANCE  # the last one of transformers is normed
    assert relative_error(reference.model.norm(out.hidden_by_layer[3]), out.last_hidden) < TOLERANCE


def test_only_requested_outputs_are_returned(pair: tuple[PreTrainedModel, DecoderModel]) -> None:
    _, model = pair
    runner = PagedRunner(model)
    full = runner.step({0: [3, 4, 5]})
    assert full.last_hidden is None
    assert full.hidden_by_layer == {}
    layout_probe = _Recorder(model)
    runner.model = layout_probe
    runner.step({0: [6]})
    for rows in (None, torch.empty(0, dtype=torch.int64)):
        with torch.inference_mode():
            assert model(*layout_probe.arguments[:4], rows).logits is None


class _Recorder:
    """Records the arguments of the last pass."""

    def __init__(self, model: DecoderModel) -> None:
        self._model, self.arguments = model, ()

    def __call__(self, *arguments: object) -> object:
        self.arguments = arguments
        return self._model(*arguments)
