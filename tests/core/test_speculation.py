from typing import Any

import pytest

from paceline.core.errors import InvalidRequest
from paceline.core.request import SpeculationParams


@pytest.mark.parametrize(
    ("name", "value"), [("max_depth", -1), ("max_depth", 2.5), ("max_depth", "3"), ("verification", "argmax")]
)
def test_an_invalid_value_is_rejected_with_its_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as error:
        SpeculationParams(**{name: value})
    assert error.value.field == f"speculation.{name}"


def test_none_leaves_the_choice_to_the_server() -> None:
    params = SpeculationParams()
    assert params.enabled
    assert (params.method, params.max_depth, params.verification) == (None, None, None)
    SpeculationParams(max_depth=0, verification="rejection")
