from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import GenerationFailed, InvalidRequest, PacelineError
from paceline.core.request import Request, SamplingParams, SpeculationParams
from paceline.worker.upstream.bodies import check, completion_body


def request(committed: tuple[tuple[int, ...] | None, ...] = (), **sampling: Any) -> Request:
    values = {"max_tokens": 20, "temperature": 0.5, "seed": 7, **sampling}
    return Request("r", (1, 2, 3), SamplingParams(**values), committed=committed)


def test_a_body_has_token_ids_and_asks_for_them() -> None:
    body = completion_body(request(top_k=5, stop=("x",), logit_bias={4: 1.5}, logprobs=2), 0, "m")
    assert body["prompt"] == [1, 2, 3]
    assert body["return_token_ids"]
    assert (body["max_tokens"], body["top_k"], body["stop"], body["logit_bias"]) == (20, 5, ["x"], {"4": 1.5})
    assert (body["logprobs"], body["return_tokens_as_token_ids"]) == (2, True)
    assert completion_body(request(), 0, "m")["top_k"] == -1


def test_a_continued_choice_starts_after_its_committed_tokens() -> None:
    one = request(committed=(None, (8, 9)), n=2, min_tokens=5)
    body = completion_body(one, 1, "m")
    assert (body["prompt"], body["max_tokens"], body["min_tokens"], body["seed"]) == ([1, 2, 3, 8, 9], 18, 3, 8)


@pytest.mark.parametrize(
    ("one", "error", "named"),
    [
        (request(prompt_logprobs=1), InvalidRequest, "prompt_logprobs"),
        (replace(request(), draft=(1,)), InvalidRequest, "drafts"),
        (replace(request(), speculation=SpeculationParams(enabled=False)), InvalidRequest, "speculation"),
        (request(committed=((5,),), json_schema={}), GenerationFailed, "JSON schema"),
        (request(committed=((5,),), presence_penalty=0.5), GenerationFailed, "presence_penalty"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_name(one: Request, error: type[PacelineError], named: str) -> None:
    with pytest.raises(error, match=named):
        check(one, can_disable_speculation=False)


def test_the_rest_is_served() -> None:
    check(request(committed=((5,),), repetition_penalty=1.2), can_disable_speculation=False)
    check(request(json_schema={}, presence_penalty=0.5), can_disable_speculation=False)
    check(replace(request(), speculation=SpeculationParams(enabled=False)), can_disable_speculation=True)
