"""The text with speculation is the text without for every family of models, and so are the bits of a row.

The proposers of `test_coupled.py` run on one small Llama. What a family adds is in its layers, so a few proposers suffice here:
a draft model, a tree, and an exit from the family's own layers.
"""

from collections.abc import Callable

import pytest
import torch

from paceline.core.clock import Clock
from paceline.engine.tiers import Tiers
from paceline.kernels.cpu import native
from paceline.kv.block_tables import BlockTables
from paceline.kv.tiers.store import TierStore
from paceline.models.blocks.host_blocks import HostBlocks
from paceline.models.families.spec import DecoderSpec
from paceline.models.runner.runner import ModelRunner, Span
from paceline.speculation.proposer import Proposer
from tests.engine.tiered import StoppedClock
from tests.exactness.suite import check_identical, mixed_requests, plain_text
from tests.fakes import TINY, MixedDepth, draft_model, random_tree, request, run, tiny_engine, tiny_model
from tests.heads import LayerSkip
from tests.models.tiny import ROW_OF, spec
from tests.specs import resized

VOCAB = TINY.vocab_size
FAMILIES: dict[str, DecoderSpec] = {
    name: resized(spec(row), vocab_size=VOCAB, hidden_size=32, head_dim=16, ffn_size=32)
    for name, row in ROW_OF.items()
    if row is not None
}
PROPOSERS: dict[str, Callable[[DecoderSpec], Proposer]] = {
    "sometimes": lambda config: draft_model(tiny_model(perturb=0.3, config=config)),
    "tree": lambda config: random_tree(VOCAB),
    "layer_skip": lambda config: LayerSkip(1),
}


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_and_prefix_hits(family: str, proposer: str) -> None:
    target = tiny_model(config=FAMILIES[family])
    engine = tiny_engine(
        target, PROPOSERS[proposer](FAMILIES[family]), MixedDepth(5), kv_tokens=16 * 12, max_batched_tokens=19
    )
    result = check_identical(target, engine, mixed_requests(6, VOCAB, seed=11), arrivals=2)
    assert result.drafted > 0
    assert engine.scheduler.tables.pool.num_cached > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_return_from_the_host_tier(family: str) -> None:
    """A small cache evicts the first prompts, which come back from host memory in the second run."""
    target = tiny_model(config=FAMILIES[family])
    prompts = [[(i * 13 + j * (i + 3)) % VOCAB for j in range(100)] for i in range(4)]
    requests = [request(f"r{i}", prompt, max_tokens=6, temperature=1.0, seed=i) for i, prompt in enumerate(prompts)]
    clock = StoppedClock()

    def make(runner: ModelRunner, tables: BlockTables, _: Clock) -> Tiers:
        memory = HostBlocks(runner, 64)
        return Tiers(tables, memory, TierStore(memory, clock), clock)

    proposer = PROPOSERS["sometimes"](FAMILIES[family])
    engine = tiny_engine(target, proposer, depth=3, kv_tokens=256, clock=clock, tiers=make)
    expected = plain_text(target, requests)
    for _ in range(2):
        for one in requests:
            assert run(engine, [one]).tokens == {(one.id, 0): expected[one.id, 0]}
    tiers = engine.scheduler.tiers
    assert tiers is not None
    assert tiers.report().host_hits > 0
    engine.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_draft_is_accepted_if_it_is_the_target(family: str) -> None:
    target = tiny_model(config=FAMILIES[family])
    engine = tiny_engine(target, draft_model(tiny_model(config=FAMILIES[family])), depth=4)
    result = check_identical(target, engine, mixed_requests(4, VOCAB, seed=12))
    assert result.accepted == result.drafted > 5


@pytest.mark.skipif(not native.available(), reason="torch's products depend on the number of rows")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_of_a_row_do_not_depend_on_the_batch(family: str) -> None:
    model = tiny_model(config=FAMILIES[family])
    ids = [(7 * i + 3) % VOCAB for i in range(40)]
    other = [(5 * i + 1) % VOCAB for i in range(23)]
    whole = ModelRunner(model, 8).forward([Span([1, 2, 3], 0, ids, num_logits=40)]).logits
    assert whole is not None
    runner, rows = ModelRunner(model, 8), []
    for first, end in ((0, 1), (1, 18), (18, 21), (21, 40)):
        spans = [Span([4, 5], 0, other, num_logits=0), Span([1, 2, 3], first, ids[first:end], num_logits=end - first)]
        rows.append(runner.forward(spans).logits)
    assert torch.equal(torch.cat([part for part in rows if part is not None]), whole)
