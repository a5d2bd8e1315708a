"""When to probe, what it may cost, and when a probe is over."""

import pytest

from paceline.speculation.depth.probing import FIRST_INTERVAL, MAX_UNTIMED, Probing

USUAL = {"chat": 0.5}
"""Half a step is lost: one step's allowance."""


def due(steps: int = FIRST_INTERVAL + 1) -> Probing:
    """One that has known of `USUAL` for so many steps."""
    probing = Probing()
    assert probing.pick(USUAL) is None
    for _ in range(steps):
        probing.begin_step(())
    return probing


def test_a_probe_stands_until_it_was_seen_and_is_paid_once() -> None:
    probing = due()
    assert [probing.pick(USUAL) for _ in range(5)] == ["chat"] * 5
    for _ in range(3):  # two to begin with and one earned: had asking cost anything, there were none left
        assert probing.pick(USUAL) == "chat"
        probing.observe("chat", rounds=1, accepted=0, expected=0.5)
    assert probing.pick(USUAL) is None


def test_while_costs_are_hardly_known_a_step_without_a_time_does_not_end_a_probe() -> None:
    probing = due(20 * FIRST_INTERVAL)
    assert probing.pick(USUAL, unsettled=["chat"]) == "chat"
    for _ in range(MAX_UNTIMED):
        probing.observe("chat", rounds=4, accepted=0, expected=0.5, is_timed=False)
        assert probing.pick(USUAL) == "chat"
    probing.observe("chat", rounds=4, accepted=0, expected=0.5, is_timed=False)
    assert probing.pick(USUAL) is None


def test_a_probe_whose_sequences_are_gone_makes_way() -> None:
    probing = due()
    assert probing.pick(USUAL) == "chat"
    assert probing.pick({}) is None
    assert probing.pick({"code": 0.1}, unsettled=["code"]) == "code"


def test_what_is_hardly_known_waits_for_no_interval() -> None:
    probing = Probing()
    probing.begin_step(())
    assert probing.pick(USUAL) is None
    assert probing.pick(USUAL, unsettled=["chat"]) == "chat"


def test_a_dear_probe_waits_for_its_allowance() -> None:
    probing, taken = Probing(), []
    for i in range(5000):
        probing.begin_step(())
        if probing.pick({"chat": 5.0}) == "chat":  # five steps' time, so ten steps' allowance
            probing.observe("chat", rounds=4, accepted=0, expected=0.1)
            taken.append(i)
    assert len(taken) <= 5000 * 0.01 / 10 + 1
    assert taken


def test_a_cheap_probe_is_due_sooner_and_pays_less() -> None:
    probing = Probing()
    assert probing.pick({"chat": 0.05}) is None
    for _ in range(FIRST_INTERVAL // 10):
        probing.begin_step(())
    assert probing.pick(USUAL) is None
    for _ in range(20):  # two steps' allowance
        assert probing.pick({"chat": 0.05}) == "chat"
        probing.observe("chat", rounds=1, accepted=1, expected=0.1, loss=-0.9)  # one that gains costs no less
    assert probing._allowance == pytest.approx(0.1)


def test_one_whose_costs_no_probe_could_tell_pays_its_full_price_from_then_on() -> None:
    probing, taken = Probing(), []
    for i in range(20_000):
        probing.begin_step(())
        while probing.pick({"chat": 10.0}, unsettled=["chat"]) == "chat":
            probing.observe("chat", rounds=4, accepted=0, expected=0.5, loss=10.0, is_timed=False)
            taken.append(i)
    repeated = 1 + MAX_UNTIMED
    assert 2 * repeated <= len(taken) <= 20_000 * 0.01 / 20 + 2 * repeated


def test_a_known_cost_need_not_be_timed_again() -> None:
    probing = due(20 * FIRST_INTERVAL)
    assert probing.pick(USUAL) == "chat"
    probing.observe("chat", rounds=4, accepted=0, expected=0.5, is_timed=False)
    assert probing.pick(USUAL) is None


def test_a_probe_that_was_dearer_than_thought_is_paid_for_afterwards() -> None:
    probing, taken = due(), []
    for i in range(20_000):
        probing.begin_step(())
        if probing.pick(USUAL) == "chat":
            probing.observe("chat", rounds=4, accepted=0, expected=0.1, loss=10.0)  # as if it had been twenty steps
            taken.append(i)
    assert len(taken) <= 20_000 * 0.01 / 20 + 1
    assert taken
