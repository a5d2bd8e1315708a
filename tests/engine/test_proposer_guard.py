"""A proposer that fails costs drafts and never text."""

from collections.abc import Sequence

import pytest

from paceline.engine.failures import ProposerGuard
from paceline.speculation.drafts.drafts import DraftBatch
from paceline.speculation.proposer import SequenceProgress
from tests.engine.harness import MODEL, PROMPT, request
from tests.exactness.suite import plain_text
from tests.fakes import TINY, FakeProposer, random_chain, run, tiny_engine


class Failing:
    """Raises in one method for batches with a sequence that `is_bad`."""

    def __init__(self, inner: FakeProposer, where: str) -> None:
        self._inner, self._where, self.traits = inner, where, inner.traits
        self.bad: set[int] = set()
        self.num_failed = 0

    def _check(self, where: str, ids: Sequence[int]) -> None:
        if where == self._where and self.bad.intersection(ids):
            self.num_failed += 1
            raise RuntimeError("a poisoned sequence")

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        self.bad.update(one.sequence_id for one in batch if len(one.ids) % 3 == 0 and one.sequence_id % 2)
        self._check("observe", [one.sequence_id for one in batch])
        self._inner.observe(batch)

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        self._check("collect", sequence_ids)
        return self._inner.collect(sequence_ids, deadline)

    def close(self, sequence_ids: Sequence[int]) -> None:
        self._check("close", sequence_ids)
        self._inner.close(sequence_ids)


@pytest.mark.parametrize("where", ["observe", "collect", "close"])
def test_texts_are_the_same_whatever_the_proposer_does(where: str) -> None:
    requests = [request(f"r{i}", PROMPT, max_tokens=20, seed=i) for i in range(6)]
    proposer = Failing(random_chain(TINY.vocab_size), where)
    result = run(tiny_engine(MODEL, proposer), requests)
    assert proposer.num_failed > 0
    assert result.tokens == plain_text(MODEL, requests)
    assert result.drafted > 0  # the others still draft


def test_only_the_sequence_that_fails_alone_is_excluded() -> None:
    proposer = Failing(random_chain(TINY.vocab_size), "collect")
    proposer.bad = {1}
    guard = ProposerGuard({"fake": proposer})
    guard.collect("fake", [0, 1, 2], 0.0)
    assert [guard.excludes(i) for i in range(3)] == [False, True, False]
    guard.close("fake", 1)
    assert not guard.excludes(1)
