"""When to probe, what it may cost, and when a probe is over."""

import pytest

from paceline.policy.depth.probing import FIRST_INTERVAL, MAX_UNTIMED, Probing
from tests.traffic import CHAT, CODE

LOSSES = {CHAT: 0.5}
"""Half a step is lost: one unit of the budget."""


def due(steps: int = FIRST_INTERVAL + 1) -> Probing:
    """A `Probing` that has known `LOSSES` for `steps` steps."""
    probing = Probing()
    assert probing.pick(LOSSES) is None
    for _ in range(steps):
        probing.begin_step(())
    return probing


def test_a_probe_is_pending_until_observed_and_paid_once() -> None:
    probing = due()
    assert [probing.pick(LOSSES) for _ in range(5)] == [CHAT] * 5
    for _ in range(3):  # the budget starts at two and has earned one: `pick` itself costs nothing
        assert probing.pick(LOSSES) == CHAT
        probing.observe(CHAT, rounds=1, accepted=0, expected=0.5)
    assert probing.pick(LOSSES) is None


def test_an_untimed_step_does_not_end_a_probe_of_unknown_cost() -> None:
    probing = due(20 * FIRST_INTERVAL)
    assert probing.pick(LOSSES, unsettled=[CHAT]) == CHAT
    for _ in range(MAX_UNTIMED):
        probing.observe(CHAT, rounds=4, accepted=0, expected=0.5, is_timed=False)
        assert probing.pick(LOSSES) == CHAT
    probing.observe(CHAT, rounds=4, accepted=0, expected=0.5, is_timed=False)
    assert probing.pick(LOSSES) is None


def test_a_pending_probe_without_candidates_is_replaced() -> None:
    probing = due()
    assert probing.pick(LOSSES) == CHAT
    assert probing.pick({}) is None
    assert probing.pick({CODE: 0.1}, unsettled=[CODE]) == CODE


def test_a_category_of_unknown_cost_waits_for_no_interval() -> None:
    probing = Probing()
    probing.begin_step(())
    assert probing.pick(LOSSES) is None
    assert probing.pick(LOSSES, unsettled=[CHAT]) == CHAT


def test_an_expensive_probe_waits_for_its_budget() -> None:
    probing, taken = Probing(), []
    for i in range(5000):
        probing.begin_step(())
        if probing.pick({CHAT: 5.0}) == CHAT:  # the time of five steps: ten units
            probing.observe(CHAT, rounds=4, accepted=0, expected=0.1)
            taken.append(i)
    assert len(taken) <= 5000 * 0.01 / 10 + 1
    assert taken


def test_a_cheap_probe_is_due_sooner_and_pays_less() -> None:
    probing = Probing()
    assert probing.pick({CHAT: 0.05}) is None
    for _ in range(FIRST_INTERVAL // 10):
        probing.begin_step(())
    assert probing.pick(LOSSES) is None
    for _ in range(20):  # two units
        assert probing.pick({CHAT: 0.05}) == CHAT
        probing.observe(CHAT, rounds=1, accepted=1, expected=0.1, loss=-0.9)  # a gain does not lower the price
    assert probing._budget == pytest.approx(0.1)


def test_after_untimed_probes_the_next_ones_pay_their_full_price() -> None:
    probing, taken = Probing(), []
    for i in range(20_000):
        probing.begin_step(())
        while probing.pick({CHAT: 10.0}, unsettled=[CHAT]) == CHAT:
            probing.observe(CHAT, rounds=4, accepted=0, expected=0.5, loss=10.0, is_timed=False)
            taken.append(i)
    repeated = 1 + MAX_UNTIMED
    assert 2 * repeated <= len(taken) <= 20_000 * 0.01 / 20 + 2 * repeated


def test_a_known_cost_need_not_be_timed_again() -> None:
    probing = due(20 * FIRST_INTERVAL)
    assert probing.pick(LOSSES) == CHAT
    probing.observe(CHAT, rounds=4, accepted=0, expected=0.5, is_timed=False)
    assert probing.pick(LOSSES) is None


def test_a_probe_pays_its_measured_loss_afterwards() -> None:
    probing, taken = due(), []
    for i in range(20_000):
        probing.begin_step(())
        if probing.pick(LOSSES) == CHAT:
            probing.observe(CHAT, rounds=4, accepted=0, expected=0.1, loss=10.0)  # twenty units
            taken.append(i)
    assert len(taken) <= 20_000 * 0.01 / 20 + 1
    assert taken
