"""Outcomes that a scheduler prepares, by the score gaps of the drafted tokens. The scripted draft counts up."""

from collections import Counter
from dataclasses import replace

import pytest

from paceline.core.request import SamplingParams
from paceline.drafting.scheduler import DraftLimits, DraftScheduler, TargetSession
from paceline.wire.draft_messages import Open, RoundRequest
from tests.processes.pools import ScriptedCore

DEPTH = 3
SMALL, LARGE = 0.1, 5.0


class GapCore(ScriptedCore):
    """Every fourth token has a small gap, all others a large one."""

    def step(self, branches):
        return [replace(drafted, gap=SMALL if is_small(drafted) else LARGE) for drafted in super().step(branches)]


def is_small(drafted):
    return drafted.token % 4 == 0


def learned(core_class, num_rounds=200):
    """A scheduler after rounds in which the target agrees with all tokens but every fourth; there it takes one of three
    alternatives."""
    scheduler = DraftScheduler(core_class(lambda ids: ids[-1] + 1), 10_000, DraftLimits(max_branch_tokens=5 * DEPTH))
    target = TargetSession("target", 0.0)
    scheduler.targets[b"target"] = target
    assert scheduler.open(target, Open(0, 1, [1], 1, SamplingParams(), 1)) is None
    state, tokens = target.sequences[1], []
    for number in range(1, num_rounds + 1):
        assert scheduler.start_round(target, RoundRequest(1, number, state.length, tokens, DEPTH)) is None
        while not state.is_due:
            run_pass(scheduler)
        state.mark_answered()
        run_pass(scheduler)
        tokens = []
        for drafted in state.draft:
            if is_small(drafted):
                tokens.append(drafted.token + 1 + number % 3)
                break
            tokens.append(drafted.token)
    scheduler.schedule()
    return scheduler, state


def run_pass(scheduler):
    branches = scheduler.schedule()
    for branch, drafted in zip(branches, scheduler._backend.step(branches), strict=True):
        branch.append(drafted)


@pytest.fixture(scope="module")
def by_gap():
    return learned(GapCore)[0]


def prepared(scheduler, *gaps):
    return [(outcome.accepted, outcome.alternative) for outcome in scheduler.plan(DEPTH, DEPTH, True, gaps)]


@pytest.mark.parametrize("position", range(DEPTH))
def test_more_branches_where_the_gap_is_small(by_gap, position):
    gaps = [LARGE] * DEPTH
    gaps[position] = SMALL
    counts = Counter(accepted for accepted, _ in prepared(by_gap, *gaps))
    assert counts[position] == max(counts.values()) >= 2
    assert prepared(by_gap, *gaps)[0] == (position, 0)


def test_unknown_gaps_are_planned_by_averages(by_gap):
    unknown = prepared(by_gap, *[None] * DEPTH)
    assert unknown == prepared(by_gap) == prepared(by_gap, None)
    assert unknown == prepared(learned(ScriptedCore)[0]), "the averages do not depend on gaps"


def test_equal_gaps_are_planned_by_averages():
    class EqualCore(ScriptedCore):
        def step(self, branches):
            return [replace(drafted, gap=1.5) for drafted in super().step(branches)]

    equal, _ = learned(EqualCore)
    assert prepared(equal, *[1.5] * DEPTH) == prepared(equal, *[None] * DEPTH) == prepared(learned(ScriptedCore)[0])


def test_more_rounds_are_ready_by_gap():
    """The target replaces tokens of a small gap: their first alternatives are prepared, wherever they are."""
    ready = {core: learned(core)[0].num_ready for core in (ScriptedCore, GapCore)}
    assert ready[GapCore] >= ready[ScriptedCore]


@pytest.mark.parametrize("nodes", [0, 5 * DEPTH])
def test_tokens_are_ranked_only_where_outcomes_are_prepared(nodes):
    scheduler = DraftScheduler(ScriptedCore(lambda ids: ids[-1] + 1), 100, DraftLimits(max_branch_tokens=nodes))
    target = scheduler.targets[b"target"] = TargetSession("target", 0.0)
    assert scheduler.open(target, Open(0, 1, [1], 1, SamplingParams(), 1)) is None
    assert scheduler.start_round(target, RoundRequest(1, 1, 1, [], DEPTH)) is None
    assert [branch.is_ranked for branch in scheduler.schedule()] == [nodes > 0]
    target.is_ahead = False
    assert [branch.is_ranked for branch in scheduler.schedule()] == [False], "drafting ahead is paused"


def test_fewer_outcomes_are_planned_without_time_for_them():
    scheduler, _ = learned(GapCore, num_rounds=20)
    gaps = [SMALL] * (DEPTH + 1)
    assert len(scheduler.plan(DEPTH, DEPTH, True, gaps)) == 4, "five branches, one of them the continuation"
    for rows in (1, 9) * 10:
        scheduler.budget.observe_pass(rows, 0.0005 + 0.001 * rows)
        scheduler.budget.observe_pause(0.012)
    assert len(scheduler.plan(DEPTH, DEPTH, True, gaps)) == 3, (
        "the fourth outcome is unlikely, and takes time from the others"
    )


def waiting(rate):
    """A scheduler whose target waits for a draft of which one token is there, and makes `rate` tokens a second; its passes take
    a millisecond."""
    scheduler, state = learned(GapCore)
    target = scheduler.targets[b"target"]
    for i in range(20):
        scheduler.budget.observe_pass(1, 0.001)
        target.rate.observe(1.0, i / rate)
    request = RoundRequest(1, state.round + 1, state.length, [9_000], DEPTH)
    assert scheduler.start_round(target, request) is None
    run_pass(scheduler)
    assert len(state.draft) == 1
    return scheduler, target, state


@pytest.mark.parametrize(("rate", "is_cut"), [(10.0, False), (990.0, True)])
def test_a_draft_ends_where_a_pass_costs_more_than_it_gains(rate, is_cut):
    scheduler, target, state = waiting(rate)
    assert not state.is_due
    scheduler.cut(target)
    assert state.is_due is is_cut
    if is_cut:
        state.mark_answered()
        assert state.num_offered == 1


def test_a_prepared_part_that_is_enough_counts_as_ready():
    scheduler, target, state = waiting(990.0)
    scheduler.cut(target)
    state.mark_answered()
    run_pass(scheduler), run_pass(scheduler)  # the outcome of full acceptance, and one token after it
    own = [drafted.token for drafted in state.branches[0].chain[:2]]
    num_ready = scheduler.num_ready
    assert scheduler.start_round(target, RoundRequest(1, state.round + 1, state.length, own, DEPTH)) is None
    assert len(state.draft) < DEPTH
    assert state.is_due
    assert scheduler.num_ready == num_ready + 1
