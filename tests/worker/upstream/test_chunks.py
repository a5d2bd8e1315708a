from typing import Any

import pytest

from paceline.core.errors import GenerationFailed
from paceline.core.output import TokenLogprobs
from paceline.core.sequence import FinishReason
from paceline.worker.upstream.connection import UpstreamFailed, parse_event, step_output


def chunk(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "", "finish_reason": None, **choice}]}


def test_events_are_json_up_to_the_end() -> None:
    assert parse_event('data: {"choices": []}') == {"choices": []}
    assert parse_event("data: [DONE]") is None
    assert parse_event(": ping") is None
    for line in ("data: {", 'data: {"error": {"message": "no"}}'):
        with pytest.raises(UpstreamFailed):
            parse_event(line)


def test_a_chunk_is_a_step_output() -> None:
    found = step_output({**chunk(text="ab", token_ids=[4, 5]), "usage": {}}, "r", 1, False)
    assert found is not None
    assert (found.request_id, found.choice, found.tokens, len(found.origins)) == ("r", 1, (4, 5), 2)
    assert found.finish_reason is None
    assert step_output(chunk(token_ids=[]), "r", 0, False) is None
    assert step_output({"choices": [], "usage": {}}, "r", 0, False) is None
    last = step_output(chunk(token_ids=[], finish_reason="stop"), "r", 0, False)
    assert last is not None
    assert (last.tokens, last.finish_reason) == ((), FinishReason.STOP)


def test_log_probabilities_are_read_by_token_id() -> None:
    logprobs = {
        "tokens": ["token_id:4"],
        "token_logprobs": [-1.0],
        "top_logprobs": [{"token_id:9": -0.5, "token_id:4": -1.0}],
    }
    found = step_output(chunk(text="a", token_ids=[4], logprobs=logprobs), "r", 0, True)
    assert found is not None
    assert found.logprobs == (TokenLogprobs(4, -1.0, ((9, -0.5), (4, -1.0)), 2),)
    by_text = {**logprobs, "top_logprobs": [{"b": -0.5}]}
    with pytest.raises(GenerationFailed, match="by text"):
        step_output(chunk(text="a", token_ids=[4], logprobs=by_text), "r", 0, True)


def test_a_server_without_token_ids_fails_the_request() -> None:
    with pytest.raises(GenerationFailed, match="return_token_ids"):
        step_output(chunk(text="a"), "r", 0, False)


def test_an_aborted_text_may_continue_elsewhere() -> None:
    with pytest.raises(UpstreamFailed, match="abort"):
        step_output(chunk(finish_reason="abort", token_ids=[]), "r", 0, False)
