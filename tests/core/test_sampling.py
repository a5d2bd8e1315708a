import math
from typing import Any

import pytest

from paceline.core.errors import InvalidRequest
from paceline.core.request import SamplingParams, SpeculationParams

NAN = math.nan


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", (0, -1, 1.5)),
        ("temperature", (-0.1, 10.1, NAN)),
        ("top_k", (-1, 2.0)),
        ("top_p", (0.0, 1.1, NAN)),
        ("min_p", (-0.1, 1.1, NAN)),
        ("repetition_penalty", (0.0, 10.1, NAN)),
        ("presence_penalty", (-2.1, 2.1, NAN)),
        ("frequency_penalty", (-2.1, 2.1, NAN)),
        ("seed", (-1, 2**63, 0.5)),
        ("n", (0, 129, 2.0)),
        ("stop", (("",), ("a", ""), "", (7,))),
        ("logprobs", (-1, 21, 1.0)),
        ("logit_bias", ({1: 100.1}, {1: -100.1}, {1: NAN})),
    ],
)
def test_a_value_out_of_range_is_rejected_with_its_field(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=name) as error:
            SamplingParams(**{name: value})
        assert error.value.field == name


def test_bounds_are_inclusive() -> None:
    low = {"temperature": 0.0, "top_k": 0, "min_p": 0.0, "presence_penalty": -2.0, "seed": 0, "n": 1, "logprobs": 0}
    high = {"temperature": 10.0, "top_p": 1.0, "min_p": 1.0, "frequency_penalty": 2.0, "seed": 2**63 - 1, "n": 128}
    SamplingParams(max_tokens=1, logit_bias={0: -100.0, 1: 100.0}, **low)
    SamplingParams(logprobs=20, repetition_penalty=10.0, **high)


def test_a_single_stop_string_becomes_a_tuple() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_is_greedy_and_has_penalties() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy
    assert not SamplingParams().has_penalties
    for name, value in (("repetition_penalty", 1.1), ("presence_penalty", -0.5), ("frequency_penalty", 0.5)):
        assert SamplingParams(**{name: value}).has_penalties


@pytest.mark.parametrize(
    ("kind", "name", "nearest"), [(SamplingParams, "max_token", "max_tokens"), (SpeculationParams, "enable", "enabled")]
)
def test_an_unknown_parameter_is_answered_with_the_nearest(kind: type, name: str, nearest: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"{kind.__name__} has no {name}: did you mean {nearest}\?"):
        kind(**{name: 1})
    with pytest.raises(InvalidRequest, match="has no zzz: there are"):
        kind(zzz=1)
    with pytest.raises(TypeError):
        kind(*[None] * 100)
