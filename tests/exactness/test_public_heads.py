"""A head of each published form: the text with it is the text without, token for token, greedy and sampled."""

import pytest

from paceline.models.decoder.forward import DecoderModel
from tests.exactness.suite import check_identical, mixed_requests
from tests.fakes import MixedDepth, tiny_engine
from tests.public_heads import V, public_proposer, target

FORMS = (
    "speculators qwen3 three layers",
    "speculators five states",
    "sglang two layers",
    "eagle3 pickle",
    "eagle1 pickle",
    "deepspec",
    "medusa",
    "medusa vllm",
    "dflash",
    "dspark",
    "dspark rnn",
    "speculators dspark",
)


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return target()


@pytest.mark.parametrize("name", FORMS)
def test_batches(model: DecoderModel, name: str) -> None:
    engine = tiny_engine(model, public_proposer(name, model), MixedDepth(7), max_num_seqs=3)
    assert check_identical(model, engine, mixed_requests(8, V)).drafted > 0


@pytest.mark.parametrize("name", FORMS)
def test_preemption_chunks_and_prefix_hits(model: DecoderModel, name: str) -> None:
    sizes = {"kv_tokens": 16 * 12, "max_model_len": 160, "max_batched_tokens": 11}
    engine = tiny_engine(model, public_proposer(name, model, 12), 3, **sizes)
    check_identical(model, engine, mixed_requests(8, V, seed=3), arrivals=1)
    assert engine.scheduler.tables.pool.num_cached > 0
