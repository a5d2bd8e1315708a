"""When to probe, what it may cost, and when a probe is over."""

from paceline.speculation.depth.probing import FIRST_INTERVAL, UNTIMED, Probing

CHEAP = {"chat": 0.1}


def due(steps: int = FIRST_INTERVAL + 1) -> Probing:
    """One that has known of `CHEAP` for so many steps."""
    probing = Probing()
    assert probing.pick(CHEAP) is None
    for _ in range(steps):
        probing.tick(())
    return probing


def test_a_probe_stands_until_it_was_seen_and_is_paid_once() -> None:
    probing = due()
    assert [probing.pick(CHEAP) for _ in range(5)] == ["chat"] * 5
    for _ in range(3):  # two to begin with and one earned: had asking cost anything, there were none left
        assert probing.pick(CHEAP) == "chat"
        probing.result("chat", rounds=1, kept=0, expected=0.5)
    assert probing.pick(CHEAP) is None


def test_while_costs_are_hardly_known_a_step_without_a_time_does_not_end_a_probe() -> None:
    probing = due(20 * FIRST_INTERVAL)
    assert probing.pick(CHEAP, unsettled=["chat"]) == "chat"
    for _ in range(UNTIMED):
        probing.result("chat", rounds=4, kept=0, expected=0.5, is_timed=False)
        assert probing.pick(CHEAP) == "chat"
    probing.result("chat", rounds=4, kept=0, expected=0.5, is_timed=False)
    assert probing.pick(CHEAP) is None


def test_a_probe_whose_sequences_are_gone_makes_way() -> None:
    probing = due()
    assert probing.pick(CHEAP) == "chat"
    assert probing.pick({}) is None
    assert probing.pick({"code": 0.1}, unsettled=["code"]) == "code"


def test_what_is_hardly_known_waits_for_no_interval() -> None:
    probing = Probing()
    probing.tick(())
    assert probing.pick(CHEAP) is None
    assert probing.pick(CHEAP, unsettled=["chat"]) == "chat"


def test_a_dear_probe_waits_for_its_allowance() -> None:
    probing, taken = Probing(), []
    for i in range(5000):
        probing.tick(())
        if probing.pick({"chat": 5.0}) == "chat":  # five steps' time, so ten steps' allowance
            probing.result("chat", rounds=4, kept=0, expected=0.1)
            taken.append(i)
    assert len(taken) <= 5000 * 0.01 / 10 + 1
    assert taken


def test_a_known_cost_need_not_be_timed_again() -> None:
    probing = due(20 * FIRST_INTERVAL)
    assert probing.pick(CHEAP) == "chat"
    probing.result("chat", rounds=4, kept=0, expected=0.5, is_timed=False)
    assert probing.pick(CHEAP) is None


def test_a_probe_that_was_dearer_than_thought_is_paid_for_afterwards() -> None:
    probing, taken = due(), []
    for i in range(20_000):
        probing.tick(())
        if probing.pick(CHEAP) == "chat":
            probing.result("chat", rounds=4, kept=0, expected=0.1, longer=10.0)  # as if it had been twenty steps
            taken.append(i)
    assert len(taken) <= 20_000 * 0.01 / 20 + 1
    assert taken
