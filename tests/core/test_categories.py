from paceline.core.request import Categories


def test_the_first_names_stand_for_themselves_and_later_ones_for_other() -> None:
    categories = Categories(limit=2)
    assert [categories.fold(name) for name in ("a", "b", "a", "c", "d", "b")] == ["a", "b", "a", "other", "other", "b"]
