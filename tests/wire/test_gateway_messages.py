from dataclasses import replace
from typing import Any

import msgspec
import pytest

from paceline.core.errors import InvalidRequest
from paceline.core.output import TokenLogprobs
from paceline.core.request import Request, SamplingParams, SpeculationFlags, SpeculationParams
from paceline.core.sequence import FinishReason, Origin
from paceline.policy.routing.kv_index import PeerHint
from paceline.wire.codec import MalformedMessage
from paceline.wire.gateway_messages import (
    TO_GATEWAY,
    TO_TARGET_WORKER,
    EncodedSubmit,
    Output,
    Outputs,
    SetFlags,
    Submit,
    check_limits,
    check_size,
)

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


def transmitted(message: Any, codec: Any) -> Any:
    return codec.decode(codec.encode(message))


@pytest.mark.parametrize("request_", [FULL, Request("r", (1,), SamplingParams(seed=0))])
@pytest.mark.parametrize("peer", [None, PeerHint("target-1", 160)])
def test_request_is_transmitted_as_it_is(request_: Request, peer: PeerHint | None) -> None:
    submit = Submit(9, 7, request_, peer)
    assert transmitted(submit, TO_TARGET_WORKER) == submit


def test_flags_are_transmitted_as_they_are() -> None:
    message = SetFlags(SpeculationFlags(False, None, 3))
    assert transmitted(message, TO_TARGET_WORKER) == message


def test_json_schema_keeps_the_order_of_its_properties() -> None:
    schema = transmitted(Submit(1, 1, FULL), TO_TARGET_WORKER).request.sampling.json_schema
    assert list(schema) == ["type", "b", "a"]


OUTPUT = Output(
    attempt=7,
    choice=1,
    start=12,
    tokens=(3, 4),
    origins=(Origin.ACCEPTED, Origin.BONUS),
    drafted=4,
    accepted=1,
    num_cached=16,
    waited=0.5,
    finish_reason=FinishReason.LENGTH,
    logprobs=(TokenLogprobs(3, -0.5, ((3, -0.5), (9, -2.0))), TokenLogprobs(4, -0.1, ())),
)


def test_outputs_are_transmitted_as_they_are() -> None:
    message = Outputs([OUTPUT, Output(8, 0, 0, (5,), (Origin.PLAIN,))])
    assert transmitted(message, TO_GATEWAY) == message


@pytest.mark.parametrize(("index", "value"), [(3, [-1]), (4, ["unknown"]), (9, "unknown")])
def test_invalid_output_is_malformed(index: int, value: Any) -> None:
    fields = msgspec.msgpack.decode(TO_GATEWAY.encode(Outputs([OUTPUT])))
    fields[1][0][index] = value
    with pytest.raises(MalformedMessage):
        TO_GATEWAY.decode(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("changes", [{"temperature": 99.0}, {"n": 0}, {"json_schema": "{"}, {"logit_bias": {"a": 1.0}}])
def test_invalid_sampling_parameters_are_malformed(changes: dict[str, Any]) -> None:
    fields = msgspec.msgpack.decode(TO_TARGET_WORKER.encode(Submit(1, 1, FULL)), strict=False)
    fields[3]["sampling"] |= changes
    with pytest.raises(MalformedMessage):
        TO_TARGET_WORKER.decode(msgspec.msgpack.encode(fields))


def test_request_that_a_worker_could_not_decode_is_rejected() -> None:
    encoded = check_size(FULL)
    assert TO_TARGET_WORKER.encode(EncodedSubmit(9, 7, encoded)) == TO_TARGET_WORKER.encode(Submit(9, 7, FULL))
    check_limits(FULL)
    for name in ("id", "cache_salt", "category", "trace"):
        with pytest.raises(InvalidRequest, match=name):
            check_size(replace(FULL, **{name: "x" * 5000}))
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        check_size(replace(FULL, sampling=replace(FULL.sampling, stop=("half a \ud800",))))
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        check_size(replace(FULL, sampling=replace(FULL.sampling, json_schema={"maximum": 2**70})))
    with pytest.raises(InvalidRequest, match="bytes"):
        check_size(replace(FULL, prompt_ids=(70000,) * 1_000_000))
