from paceline.core.errors import InvalidRequest
from paceline.core.flags import SpeculationFlags
from paceline.server.methods import METHODS, offered_methods
from tests.server.fakes import served


def test_those_that_a_flag_may_name() -> None:
    assert offered_methods(served().llm.validate_flags) == ("ngram",)


def test_all_and_none() -> None:
    def refuse(flags: SpeculationFlags) -> None:
        raise InvalidRequest("no", field="method")

    assert offered_methods(lambda flags: None) == METHODS
    assert offered_methods(refuse) == ()
