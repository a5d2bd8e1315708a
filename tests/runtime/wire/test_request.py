"""Requests and outputs arrive as they were sent."""

from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import InvalidRequest
from paceline.core.output import StepOutput, TokenLogprobs
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import FinishReason, Origin
from paceline.core.speculation import SpeculationParams
from paceline.runtime.wire.codec import MalformedMessage
from paceline.runtime.wire.request import check_fits, from_output, from_submit, to_output, to_submit
from paceline.runtime.wire.stream_messages import TO_GATEWAY, TO_TARGET_WORKER, Outputs, Submit

FULL = Request(
    id="r",
    prompt_ids=(5, 300000, 7),
    sampling=SamplingParams(
        max_tokens=9,
        temperature=0.7,
        top_k=3,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias={3: 2.5},
        seed=2**62 + 1,
        n=3,
        stop=("a", "bé"),
        stop_token_ids=(4, 5),
        ignore_eos=True,
        logprobs=2,
        json_schema={"type": "object", "b": 1, "a": 2},
    ),
    speculation=SpeculationParams(False, "ngram", 3, "rejection"),
    category="code",
    priority=-2,
    cache_salt="pepper",
    committed=((1, 2), None, ()),
)


def over_the_wire(message: Any, codec: Any) -> Any:
    return codec.decode(codec.encode(message))


@pytest.mark.parametrize("request_", [FULL, Request("r", (1,), SamplingParams(seed=0))])
def test_requests(request_: Request) -> None:
    submit = over_the_wire(to_submit(request_, 7, 9), TO_TARGET_WORKER)
    assert isinstance(submit, Submit)
    assert (submit.attempt, submit.epoch) == (7, 9)
    assert from_submit(submit, "r") == request_


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    submit = over_the_wire(to_submit(FULL, 1, 1), TO_TARGET_WORKER)
    schema = from_submit(submit, "r").sampling.json_schema
    assert list(schema or ()) == ["type", "b", "a"]


def test_outputs() -> None:
    output = StepOutput(
        request_id="r",
        sequence_id=1,
        choice=1,
        tokens=(3, 4),
        origins=(Origin.ACCEPTED, Origin.BONUS),
        text="né",
        drafted=4,
        accepted=1,
        num_cached=16,
        logprobs=(TokenLogprobs(3, -0.5, ((3, -0.5), (9, -2.0))), TokenLogprobs(4, -0.1, ())),
        finish_reason=FinishReason.LENGTH,
    )
    message = over_the_wire(Outputs([to_output(output, 7, 12)]), TO_GATEWAY)
    assert isinstance(message, Outputs)
    assert (message.outputs[0].attempt, message.outputs[0].start) == (7, 12)
    assert from_output(message.outputs[0], "r") == output


def test_what_is_no_request_is_refused() -> None:
    submit = to_submit(Request("r", (1,), SamplingParams(seed=0)), 1, 1)
    bad = over_the_wire(
        Submit(**{**_fields(submit), "sampling": _replaced(submit.sampling, temperature=99.0)}), TO_TARGET_WORKER
    )
    with pytest.raises(InvalidRequest, match="temperature"):
        from_submit(bad, "r")
    bad = Submit(**{**_fields(submit), "sampling": _replaced(submit.sampling, json_schema="{")})
    with pytest.raises(InvalidRequest, match="no JSON"):
        from_submit(bad, "r")
    with pytest.raises(MalformedMessage):
        over_the_wire(Submit(**{**_fields(submit), "prompt_ids": [-1]}), TO_TARGET_WORKER)


@pytest.mark.parametrize("change", [{"origins": [9]}, {"origins": []}, {"finish_reason": "tired"}])
def test_words_that_are_none_of_ours(change: dict[str, Any]) -> None:
    output = to_output(StepOutput("r", 0, 0, (1,), (Origin.PLAIN,), ""), 1, 0)
    with pytest.raises(ValueError, match=r"origins|tired"):
        from_output(type(output)(**{**_fields(output), **change}), "r")


def _fields(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def _replaced(struct: Any, **changes: Any) -> Any:
    return type(struct)(**{**_fields(struct), **changes})


def test_what_a_worker_could_not_read_is_refused_here() -> None:
    check_fits(FULL)
    with pytest.raises(InvalidRequest, match="beyond"):
        check_fits(replace(FULL, cache_salt="x" * 5000))
    with pytest.raises(InvalidRequest, match="beyond"):
        check_fits(replace(FULL, sampling=replace(FULL.sampling, stop=("half a \ud800",))))
    with pytest.raises(InvalidRequest, match="bytes long"):
        check_fits(replace(FULL, prompt_ids=(70000,) * 1_000_000))
