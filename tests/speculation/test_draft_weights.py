"""The weights of a proposer's draft change between two steps; what other weights computed is not shared."""

import pytest

from paceline.core.errors import IncompatibleDraft
from paceline.speculation.draft_weights import DraftWeights
from paceline.speculation.proposers.eagle.eagle import EagleProposer
from paceline.speculation.proposers.model.draft_model import DraftModelProposer
from tests.fakes import request, run, tiny_engine, tiny_model
from tests.heads import distilled, eagle, tiny_distilled, tiny_eagle, tiny_medusa

TARGET = tiny_model()
PROMPT = [int(i * 7 % 40) for i in range(40)]


def weights_of(proposer: EagleProposer | DraftModelProposer) -> DraftWeights:
    weights = proposer.traits.weights
    assert weights is not None
    return weights


def test_a_draft_of_another_kind_is_refused_and_nothing_changes() -> None:
    weights = weights_of(eagle(TARGET))
    with pytest.raises(IncompatibleDraft, match="same kind"):
        weights.set_spare(tiny_medusa(TARGET))
    assert not weights.has_spare


def test_every_version_has_its_own_salt() -> None:
    weights = weights_of(eagle(TARGET))
    assert weights.salt("key") == "key"
    weights.set_spare(tiny_eagle(TARGET, seed=1))
    weights.exchange()
    second = weights.salt("key")
    weights.exchange()
    assert weights.salt("key") == "key"
    weights.set_spare(tiny_eagle(TARGET, seed=2))
    weights.exchange()
    assert len({"key", second, weights.salt("key")}) == 3


@pytest.mark.parametrize("kind", ["eagle", "distilled"])
def test_blocks_of_other_weights_are_not_used(kind: str) -> None:
    proposer = eagle(TARGET) if kind == "eagle" else distilled(TARGET)
    spare = tiny_eagle(TARGET, seed=1) if kind == "eagle" else tiny_distilled(TARGET, seed=1)
    tables = proposer._cache.tables if isinstance(proposer, EagleProposer) else proposer.drafter.tables
    weights = weights_of(proposer)
    engine = tiny_engine(TARGET, proposer, prefix_caching=False)
    opened: list[int] = []
    original = tables.open

    def record(sequence_id: int, ids: list[int], salt: str = "") -> int:
        opened.append(original(sequence_id, ids, salt))
        return opened[-1]

    tables.open = record  # type: ignore[assignment, method-assign]
    for name in ("first", "again"):
        run(engine, [request(name, PROMPT, temperature=0.0)])
    assert opened[0] == 0
    assert opened[1] > 0, "the same weights share their blocks"
    weights.set_spare(spare)
    weights.exchange()
    run(engine, [request("other", PROMPT, temperature=0.0)])
    assert opened[2] == 0
    engine.add(request("mixed", [3, *PROMPT], temperature=0.0))
    for _ in range(3):
        engine.step()
    weights.exchange()  # while it runs
    while engine.has_work:
        engine.step()
    weights.exchange()
    longer = [3, *PROMPT, *range(20)]
    run(engine, [request("after", longer, temperature=0.0)])
    assert opened[4] <= len(PROMPT)
    weights.exchange()
    run(engine, [request("back", PROMPT, temperature=0.0)])
    assert opened[5] > 0, "the first weights find their blocks again"
