from paceline.engine.stats.step_totals import StepTotals


def test_seconds_go_to_the_part_they_were_spent_in() -> None:
    totals = StepTotals()
    totals.add(0, True, draft=0.2, network=0.1, verify=1.0)
    totals.add(0, True, draft=0.2, network=0.0, verify=1.0)
    totals.add(0, False, draft=0.0, network=0.0, verify=0.5)
    totals.add(7, True, draft=1.0, network=2.0, verify=4.0)
    assert totals.seconds == {"draft": 0.4, "network": 0.1, "verify": 2.0, "plain": 0.5, "prompt": 7.0}


def test_what_was_read_does_not_change() -> None:
    totals = StepTotals()
    before = totals.seconds
    totals.add(0, False, 0.0, 0.0, 1.0)
    assert before["plain"] == 0.0
