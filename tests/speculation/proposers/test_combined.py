"""Several methods behind one proposer."""

from collections.abc import Callable, Sequence

import pytest

from paceline.core.clock import VirtualClock
from paceline.core.request import SamplingParams
from paceline.speculation.drafts.drafts import Draft, DraftBatch, DraftTree, depths
from paceline.speculation.proposer import HiddenRequest, ProposerTraits, SequenceProgress
from paceline.speculation.proposers.choice import EXPLORE_EVERY
from paceline.speculation.proposers.combined import CombinedProposer
from paceline.speculation.proposers.lookahead import LookaheadProposer
from paceline.speculation.proposers.suffix import NgramProposer
from tests.fakes import FakeProposer

TEXT = list(range(100, 2_000))


def guesser(right: Callable[[int], int], length: int = 4) -> FakeProposer:
    """Drafts `length` tokens, of which the first `right(position)` are those of the text."""

    def guess(progress: SequenceProgress) -> tuple[list[int], list[int]]:
        at, count = len(progress.ids), min(length, progress.depth)
        tokens = [TEXT[at + k] if k < right(at) else 1 for k in range(count)]
        return tokens, list(range(-1, count - 1))

    return FakeProposer(guess)


class Slow(FakeProposer):
    """Takes `seconds` per draft, and records the depths it observes."""

    def __init__(self, inner: FakeProposer, clock: VirtualClock, seconds: float) -> None:
        super().__init__(inner.guess)
        self.clock, self.seconds, self.depths = clock, seconds, list[int]()
        self.traits = ProposerTraits(HiddenRequest((3,), last=True))

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        super().observe(batch)
        self.depths += [progress.depth for progress in batch]

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        self.clock.advance(self.seconds)
        return super().collect(sequence_ids, deadline)


def play(
    proposer: CombinedProposer, clock: VirtualClock, rounds: int, sequence_id: int = 0, depth: int = 4
) -> list[str]:
    """The methods used in `rounds` rounds against the text, 10 ms each."""
    ids, used = TEXT[:5], []
    for _ in range(rounds):
        proposer.observe([SequenceProgress(sequence_id, ids, depth, SamplingParams(), 0, 0, 1, "coupled")])
        used.append(proposer.method(sequence_id))
        draft = proposer.collect([sequence_id], 0.0).split().get(sequence_id)
        accepted = 0
        for token in draft.tokens if draft else ():
            if token != TEXT[len(ids) + accepted]:
                break
            accepted += 1
        clock.advance(0.010)
        ids += TEXT[len(ids) : len(ids) + accepted + 1]
    return used


def test_the_better_lookup_is_found() -> None:
    clock = VirtualClock()
    proposer = CombinedProposer({"poor": guesser(lambda at: 0), "good": guesser(lambda at: 3)}, {}, clock)
    assert play(proposer, clock, 40)[5:] == ["good"] * 35


def test_an_unused_lookup_is_observed_too() -> None:
    clock = VirtualClock()
    later = guesser(lambda at: 3 if at > 200 else 0)
    proposer = CombinedProposer({"steady": guesser(lambda at: 1), "later": later}, {}, clock)
    used = play(proposer, clock, 200)
    assert set(used[20:90]) == {"steady"}
    assert set(used[-20:]) == {"later"}


@pytest.mark.parametrize(("seconds", "expected"), [(0.004, "model"), (0.050, "lookup")])
def test_a_model_drafts_only_where_it_pays(seconds: float, expected: str) -> None:
    clock = VirtualClock()
    model = Slow(guesser(lambda at: 4), clock, seconds)
    proposer = CombinedProposer({"lookup": guesser(lambda at: 1)}, {"model": model}, clock)
    used = play(proposer, clock, 200)
    assert used[20:].count(expected) >= 180 * (1 - 1 / EXPLORE_EVERY) - 1
    assert model.depths == [4 if method == "model" else 0 for method in used]


def test_a_lookup_drafts_if_the_model_returns_nothing() -> None:
    clock = VirtualClock()
    empty = FakeProposer(lambda progress: ([], []))
    proposer = CombinedProposer({"lookup": guesser(lambda at: 1, length=2)}, {"empty": empty}, clock)
    proposer.observe([SequenceProgress(0, TEXT[:5], 4, SamplingParams(), 0, 0, 1, "coupled")])
    assert proposer.method(0) == "empty"  # an unknown model is used at once
    assert proposer.collect([0], 0.0).split()[0].tokens == (TEXT[5], 1)


def test_depth_zero_requests_no_drafts() -> None:
    clock = VirtualClock()
    lookup, model = guesser(lambda at: 1), Slow(guesser(lambda at: 1), clock, 1.0)
    proposer = CombinedProposer({"lookup": lookup}, {"model": model}, clock)
    proposer.observe([SequenceProgress(0, TEXT[:5], 0, SamplingParams(), 0, 0, 1, "coupled")])
    assert proposer.collect([0], 0.0).sequence_ids == ()
    assert lookup.progress == {}
    assert model.depths == [0]
    assert clock.now() == 0.0


def test_close_closes_every_part() -> None:
    clock = VirtualClock()
    lookup, model = guesser(lambda at: 1), guesser(lambda at: 1)
    proposer = CombinedProposer({"lookup": lookup}, {"model": model}, clock)
    play(proposer, clock, 3)
    proposer.close([0, 9])
    proposer.close([0])
    assert lookup.progress == model.progress == {}
    assert proposer.method(0) == ""
    assert proposer.collect([0], 0.0).sequence_ids == ()


def test_it_requests_the_hidden_states_of_all_models() -> None:
    clock = VirtualClock()
    other = Slow(guesser(lambda at: 1), clock, 0.0)
    other.traits = ProposerTraits(HiddenRequest((1, 3)))
    models = {"one": Slow(guesser(lambda at: 1), clock, 0.0), "other": other, "none": guesser(lambda at: 1)}
    assert CombinedProposer({}, models, clock).traits.hidden == HiddenRequest((1, 3), last=True)
    assert CombinedProposer({"ngram": guesser(lambda at: 1)}, {}, clock).traits.hidden is None


def test_only_the_drafting_part_gets_the_picks_after_its_nodes() -> None:
    clock = VirtualClock()
    good, poor = guesser(lambda at: 3), guesser(lambda at: 0)
    model = FakeProposer(lambda progress: ([], []))
    proposer = CombinedProposer({"good": good, "poor": poor}, {"model": model}, clock)
    play(proposer, clock, 10)
    assert proposer.method(0) == "good"
    ids = TEXT[:60]
    proposer.observe([SequenceProgress(0, ids, 4, SamplingParams(), 0, 0, 1, "coupled", picks=(1, 2, 3))])
    assert [part.progress[0].picks for part in (good, poor, model)] == [(1, 2, 3), (1,), (1,)]


def test_lookahead_learns_from_picks_as_a_part() -> None:
    """Nothing repeats in this text: only the target's corrections give n-grams."""
    clock = VirtualClock()
    proposer = CombinedProposer({"ngram": NgramProposer(), "lookahead": LookaheadProposer()}, {}, clock)
    ids, picks, accepted = TEXT[:5], list[int](), 0
    for _ in range(30):
        proposer.observe([SequenceProgress(0, ids, 8, SamplingParams(), 0, 0, 1, "coupled", picks=picks)])
        draft = proposer.collect([0], 0.0).split().get(0, Draft())
        at = len(ids)
        picks = [TEXT[at], *(TEXT[at + level] for level in depths(draft.parents))]
        matched = DraftTree(draft.tokens, draft.parents).num_matched(TEXT[at:])
        accepted += matched
        ids += TEXT[at : at + matched + 1]
    assert accepted > 20


def test_a_method_is_a_lookup_or_a_model() -> None:
    with pytest.raises(ValueError, match="both a lookup and a model: x"):
        CombinedProposer({"x": guesser(lambda at: 1)}, {"x": guesser(lambda at: 1)}, VirtualClock())
