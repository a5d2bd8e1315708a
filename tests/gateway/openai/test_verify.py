"""POST /v1/verify. tests/engine/test_given_drafts.py has the rounds themselves."""

from typing import Any

import pytest

from tests.gateway.fakes import served


def test_a_round_reaches_the_target_as_one_request() -> None:
    server = served("abc")
    body = {"prompt": [5, 6], "output": [7], "draft": [8, 9], "temperature": 0.7, "seed": 4, "max_tokens": 20}
    answer = server.post("/v1/verify", body).json()
    (request,) = server.target.requests
    assert (request.prompt_ids, request.committed, request.draft) == ((5, 6), ((7,),), (8, 9))
    assert (request.sampling.seed, request.sampling.max_tokens, request.speculation.enabled) == (4, 20, False)
    assert answer["object"] == "verify"
    assert len(answer["tokens"]) == answer["usage"]["completion_tokens"] > 0
    assert answer["finish_reason"] == "stop"


def test_a_first_round_without_a_draft() -> None:
    server = served("a")
    assert server.post("/v1/verify", {"prompt": [5], "temperature": 0}).status_code == 200
    assert (server.target.requests[0].committed, server.target.requests[0].draft) == ((), ())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "seed"),
        ({"temperature": 0.5}, "seed"),
        ({"temperature": 0, "n": 2}, None),
        ({"temperature": 0, "stop": ["x"]}, None),
        ({"temperature": 0, "stream": True}, None),
        ({"temperature": 0, "speculation": {"enabled": False}}, None),
        ({"temperature": 0, "max_tokens": 2, "output": [1, 2]}, "output"),
        ({"temperature": 0, "draft": [1] * 33}, "draft"),
        ({"temperature": 0, "draft": [100_000]}, "draft"),
        ({"temperature": 0, "prompt": "text"}, None),
    ],
)
def test_what_does_not_fit_a_round_is_refused(body: dict[str, Any], param: str | None) -> None:
    answer = served().post("/v1/verify", {"prompt": [5, 6], **body})
    assert answer.status_code in (400, 422), answer.text
    assert param is None or param in (answer.json()["error"]["param"] or "")


def test_tokens_of_log_probabilities_are_named_by_id_if_asked() -> None:
    body = {"prompt": "x", "logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = served("Hey").post("/v1/completions", body).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
