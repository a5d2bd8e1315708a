"""The outputs of one session arrive in order, and its end after them."""

import asyncio

import pytest

from paceline.core.errors import GenerationFailed
from paceline.core.output import StepOutput
from paceline.core.request import ValidatedRequest
from paceline.core.sequence import Origin
from paceline.gateway.sessions.gateway import OutputStream
from tests.engine.harness import GREEDY, PROMPT, SAMPLED, request


def stream_of() -> OutputStream:
    requests = [request("a", PROMPT, **GREEDY), request("b", PROMPT, **{**SAMPLED, "n": 3})]
    return OutputStream([ValidatedRequest.of(one) for one in requests], [], deadline=9.0)


def output(token: int) -> StepOutput:
    return StepOutput("a", 0, 0, (token,), (Origin.PLAIN,))


def test_choices_of_all_requests_are_unfinished_at_first() -> None:
    stream = stream_of()
    assert stream.unfinished == {"a": 1, "b": 3}
    assert stream.num_unfinished == 4


def test_a_batch_has_all_outputs_since_the_previous_one() -> None:
    async def run() -> None:
        stream = stream_of()
        batches = aiter(stream)
        stream.put(output(1))
        stream.put(output(2))
        assert await anext(batches) == [output(1), output(2)]
        stream.put(output(3))
        stream.unfinished.clear()
        assert await anext(batches) == [output(3)]
        with pytest.raises(StopAsyncIteration):
            await anext(batches)

    asyncio.run(run())


def test_the_first_error_follows_the_outputs_before_it() -> None:
    async def run() -> None:
        stream = stream_of()
        batches = aiter(stream)
        stream.put(output(1))
        stream.fail(GenerationFailed("first"))
        stream.fail(GenerationFailed("second"))
        assert await anext(batches) == [output(1)]
        with pytest.raises(GenerationFailed, match="first"):
            await anext(batches)

    asyncio.run(run())
