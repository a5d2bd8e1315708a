from paceline.cluster.health.health import CanaryJury

RIGHT, WRONG = (1, 2, 3), (1, 2, 4)


def test_the_odd_one_out() -> None:
    jury = CanaryJury()
    assert jury.hear("a", RIGHT) == {"a": True}
    jury.hear("b", RIGHT)
    assert jury.hear("c", WRONG) == {"a": True, "b": True, "c": False}


def test_the_majority_may_come_later() -> None:
    jury = CanaryJury()
    jury.hear("a", WRONG)
    jury.hear("b", RIGHT)
    assert jury.hear("c", RIGHT) == {"a": False, "b": True, "c": True}


def test_of_two_the_one_that_changed_its_word_is_wrong() -> None:
    jury = CanaryJury()
    jury.hear("a", RIGHT)
    jury.hear("b", RIGHT)
    assert jury.hear("a", WRONG) == {"a": False, "b": True}
    assert jury.hear("a", RIGHT) == {"a": True, "b": True}


def test_who_left_has_no_voice() -> None:
    jury = CanaryJury()
    jury.hear("a", WRONG)
    jury.forget("a")
    assert jury.hear("b", RIGHT) == {"b": True}
