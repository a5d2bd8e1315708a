import gc

from paceline.core.garbage import keep_loaded


def test_what_is_loaded_is_not_looked_through_again() -> None:
    loaded: list[object] = [[]]
    keep_loaded()
    made: list[object] = [[]]
    watched = {id(one) for one in gc.get_objects()}
    assert id(loaded) not in watched
    assert id(made) in watched
