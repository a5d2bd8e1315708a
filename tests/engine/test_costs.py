"""The cost of drafting: parts of a `collect` call, draft prefills, and an idle device."""

import pytest

from paceline.core.sequence import Origin
from paceline.policy.depth.observation import DraftingObservation, RoundObservation
from paceline.speculation.drafts.drafts import DraftCost, DraftPrefill
from paceline.speculation.verification.verification import Verdict
from tests.engine.step.case import Case, GraphRound, chain
from tests.traffic import traffic_class


def test_network_time_is_no_part_of_drafting() -> None:
    case = Case()  # its first method takes a quarter of a second
    sequence, plain = case.sequence(), Verdict((), (4,), (Origin.PLAIN,))
    for network, expected in ((0.1, 0.1), (9.0, 0.25), (0.0, 0.0)):
        case.one.cost = DraftCost(network_seconds=network)
        schedule = case.schedule((sequence, 1))
        case.speculator.propose(schedule)
        case.learn(schedule, {}, {sequence.id: plain}, 0.5)
        step = case.depth.steps[-1]
        assert step.network_seconds == pytest.approx(expected)
        assert step.drafting[0].seconds == pytest.approx(0.25 - expected)


def test_the_deadline_is_the_time_of_the_last_pass() -> None:
    case = Case()
    sequence = case.sequence()
    case.speculator.propose(case.schedule((sequence, 1)))
    assert case.one.collected[-1][1] == 100.0
    case.learn(case.schedule(), {}, {}, verify_seconds=0.5)
    now = case.clock.now()
    case.speculator.propose(case.schedule((sequence, 1)))
    assert case.one.collected[-1][1] == now + 0.5


def test_each_method_has_its_own_seconds() -> None:
    case = Case(chain(0, 5, 6))
    case.two.clock, case.two.seconds = case.clock, 0.5
    a, b = case.sequence(), case.sequence(method="two")
    schedule = case.schedule((a, 2), (b, 3))
    drafts = case.speculator.propose(schedule)
    plain = Verdict((), (4,), (Origin.PLAIN,))
    case.learn(schedule, drafts, {a.id: plain, b.id: plain}, 0.125)
    (step,) = case.depth.steps
    assert step.drafting == (DraftingObservation("one", 2, 0.25), DraftingObservation("two", 3, 0.5))


def test_draft_prefill_is_no_part_of_drafting() -> None:
    """Neither the prefill of this `collect`, nor one that was reported before it."""
    case = Case(chain(0, 5, 6))
    sequence = case.sequence()
    case.speculator.add_draft_prefill("one", DraftPrefill(30, 4.0))
    case.one.cost = DraftCost(DraftPrefill(20, 0.125))
    schedule = case.schedule((sequence, 2))
    drafts = case.speculator.propose(schedule)
    case.learn(schedule, drafts, {sequence.id: Verdict((), (4,), (Origin.PLAIN,))}, 0.125)
    (step,) = case.depth.steps
    assert step.drafting == (DraftingObservation("one", 2, 0.125, prefill_tokens=50, prefill_seconds=4.125),)
    assert step.seconds == 4.125 + 0.125 + 0.125


def test_a_draft_prefill_is_reported_with_the_next_step_that_drafts() -> None:
    case = Case()
    sequence = case.sequence()
    case.speculator.add_draft_prefill("one", DraftPrefill(30, 0.5))
    case.learn_graph([], 1, 1, 1, draft_seconds=0.0, verify_seconds=0.25, context=9)
    for _ in range(2):
        case.learn_graph([GraphRound(sequence, 4, 4, 2)], 1, 1, 5, draft_seconds=0.5, verify_seconds=0.25, context=9)
    plain, first, second = case.depth.steps
    assert plain.seconds == 0.25
    assert first.drafting == (DraftingObservation("one", 4, 0.5, prefill_tokens=30, prefill_seconds=0.5),)
    assert second.drafting == (DraftingObservation("one", 4, 0.5),)


def test_idle_time_before_a_drafting_step_is_its_switch_on_time() -> None:
    case = Case()
    sequence = case.sequence()
    drafts, times = [GraphRound(sequence, 4, 4, 2)], {"draft_seconds": 0.5, "verify_seconds": 0.25, "context": 9}
    case.speculator.graph_paused()
    case.clock.advance(2.0)
    case.speculator.add_draft_prefill("one", DraftPrefill(30, 0.5))  # a part of the idle time
    case.speculator.graph_resumed()
    case.learn_graph(drafts, 1, 8, 40, **times)
    case.speculator.graph_resumed()
    case.learn_graph(drafts, 1, 8, 40, **times)
    case.speculator.graph_paused()
    case.clock.advance(2.0)
    case.speculator.graph_resumed()
    case.learn_graph([], 1, 8, 8, **times)  # a plain step: the graph paused for another reason
    assert [step.switch_on_seconds for step in case.depth.steps] == [1.5, 0.0, 0.0]
    first = case.depth.steps[0]
    assert first.seconds == 1.5 + 0.5 + 0.5 + 0.25
    assert (first.batch, first.num_slots, first.rows) == (1, 8, 40)


def test_a_host_step_in_between_is_no_idle_time() -> None:
    case = Case()
    sequence = case.sequence()
    case.speculator.graph_paused()
    case.clock.advance(2.0)
    case.learn(case.schedule((sequence, 0)), {}, {sequence.id: Verdict((), (4,), (Origin.PLAIN,))}, 0.125)
    case.speculator.graph_resumed()
    case.learn_graph([GraphRound(sequence, 4, 4, 2)], 1, 1, 5, draft_seconds=0.5, verify_seconds=0.25, context=9)
    assert case.depth.steps[-1].switch_on_seconds == 0.0


def test_host_steps_of_graph_methods_are_untimed() -> None:
    case = Case(chain(0, 5, 6), graph_methods=frozenset({"one"}))
    a, b = case.sequence(), case.sequence(method="two")
    plain = Verdict((), (4,), (Origin.PLAIN,))
    case.learn(case.schedule((a, 0)), {}, {a.id: plain}, 0.125)
    case.learn(case.schedule((b, 0)), {}, {b.id: plain}, 0.125)
    case.learn_graph([GraphRound(a, 4, 4, 2)], 1, 1, 5, draft_seconds=0.5, verify_seconds=0.25, context=9)
    case.learn_graph([], 1, 1, 1, draft_seconds=0.0, verify_seconds=9.0, context=9, is_timed=False)
    assert [step.is_timed for step in case.depth.steps] == [False, True, True, False]
    graph_step = case.depth.steps[2]
    assert graph_step.drafting == (DraftingObservation("one", 4, 0.5),)
    assert graph_step.rounds == (
        RoundObservation(a.id, traffic_class("one/default"), 4, 2, 4, num_nodes=4, path=(0, 1)),
    )
