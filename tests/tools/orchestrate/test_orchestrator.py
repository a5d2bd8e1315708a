"""The loop over real servers: one Paceline server is target, draft, and an unknown OpenAI server."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from paceline.core.config import SpeculationConfig
from paceline.core.errors import IncompatibleDraft, InvalidRequest
from paceline.core.request import SamplingParams
from paceline.core.sequence import FinishReason
from paceline.tools.orchestrate import orchestrator
from paceline.tools.orchestrate.compatibility import check_compatible, find_end_tokens
from paceline.tools.orchestrate.endpoint import Endpoint, EndpointFailed, EndpointLacks, HttpClient, connect
from paceline.tools.orchestrate.orchestrator import Answer, Orchestrator, find_endpoint
from paceline.tools.orchestrate.servers import LlamaCppEndpoint, OpenAIEndpoint, PacelineEndpoint, VllmEndpoint
from tests.gateway.process import server_process

FIXED = SpeculationConfig(depth="fixed", max_depth=4)
QUESTION = [{"role": "user", "content": "Name three colours."}]
PROMPT = "The capital of France is"
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, top_k=20, seed=5)
PENALISED = SamplingParams(max_tokens=24, temperature=0.9, seed=5, frequency_penalty=0.5, logit_bias={30: -2.0})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server_process(draft="none") as process:
        yield process.url


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes no draft late."""
    monkeypatch.setattr(orchestrator, "DRAFT_TIMEOUT", 60.0)


def plain(url: str, sampling: SamplingParams, prompt: Any = PROMPT) -> tuple[str, list[int]]:
    """Text and tokens of the server alone."""
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "frequency_penalty")
    body = {name: getattr(sampling, name) for name in names if getattr(sampling, name) is not None}
    body |= {"logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()}, "return_token_ids": True}
    path, key = ("completions", "prompt") if isinstance(prompt, str) else ("chat/completions", "messages")
    answer = httpx.post(f"{url}/v1/{path}", json={key: prompt, **body}, timeout=60).json()["choices"][0]
    return answer["text"] if "text" in answer else answer["message"]["content"], answer["token_ids"]


def run(opened: Any, *requests: tuple[Any, SamplingParams]) -> list[Answer]:
    async def all_() -> list[Answer]:
        async with opened as found:
            return list(await asyncio.gather(*(found.generate(*one) for one in requests)))

    return asyncio.run(all_())


def test_texts_are_those_of_the_target_alone(url: str) -> None:
    requests = [(PROMPT, GREEDY), (QUESTION, GREEDY), (PROMPT, SAMPLED), (PROMPT, PENALISED)]
    answers = run(Orchestrator.connect(url, url + "/v1", config=FIXED), *requests)
    for answer, (prompt, sampling) in zip(answers, requests, strict=True):
        assert (answer.text, list(answer.token_ids)) == plain(url, sampling, prompt)
    assert [answer.tokens_per_round > 3 for answer in answers[:3]] == [True] * 3  # the draft shares the noise


def test_the_end_of_the_text_is_the_targets(url: str) -> None:
    sampling = SamplingParams(max_tokens=200, temperature=0.0)
    (answer,) = run(Orchestrator.connect(url, url, config=FIXED), (QUESTION, sampling))
    assert answer.finish_reason is FinishReason.STOP
    assert (answer.text, list(answer.token_ids)) == plain(url, sampling, QUESTION)


def test_a_stop_string_ends_the_text(url: str) -> None:
    whole = plain(url, GREEDY)[0]
    stop = whole[8:11]
    (answer,) = run(
        Orchestrator.connect(url, url, config=FIXED),
        (PROMPT, SamplingParams(max_tokens=24, temperature=0.0, stop=(stop,))),
    )
    assert (answer.text, answer.finish_reason) == (whole[: whole.index(stop)], FinishReason.STOP)


class Scored(VllmEndpoint):
    """Our server called as vLLM is: by log-probabilities of the prompt."""


def with_endpoints(url: str, make: Any, config: SpeculationConfig = FIXED) -> Any:
    """An orchestrator of the endpoints that `make(client)` returns as (draft, target, ends)."""
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def opened() -> Any:
        async with connect(url) as client:
            draft, target, ends = await make(client)
            yield Orchestrator(draft, target, config, ends)

    return opened()


@pytest.mark.slow
def test_prompt_log_probabilities_give_the_same_text(url: str) -> None:
    async def make(client: HttpClient) -> tuple[Endpoint, Endpoint, frozenset[int]]:
        target = Scored(client, "smollm2", 1024)
        return PacelineEndpoint(client, "smollm2"), target, await find_end_tokens(target)

    long = SamplingParams(max_tokens=200, temperature=0.0)
    answers = run(with_endpoints(url, make), (PROMPT, GREEDY), (QUESTION, long))
    assert [(a.text, list(a.token_ids)) for a in answers] == [plain(url, GREEDY), plain(url, long, QUESTION)]
    assert all(answer.tokens_per_round > 2 for answer in answers)


def test_a_text_sampled_from_log_probabilities_is_that_of_our_engine(url: str) -> None:
    async def make(client: HttpClient) -> tuple[Endpoint, Endpoint, frozenset[int]]:
        return PacelineEndpoint(client, "smollm2"), Scored(client, "smollm2", 1024), frozenset()

    sampling = SamplingParams(max_tokens=12, temperature=0.9, top_k=8, seed=5)
    (answer,) = run(with_endpoints(url, make), (PROMPT, sampling))
    assert list(answer.token_ids) == plain(url, sampling)[1]


def test_end_tokens_are_found_by_asking(url: str) -> None:
    async def find() -> frozenset[int]:
        async with connect(url) as client:
            return await find_end_tokens(Scored(client, "smollm2"))

    assert asyncio.run(find()) == {0, 2}  # <|endoftext|> and <|im_end|>


def test_a_server_without_token_ids_drafts_with_text(url: str) -> None:
    async def make(client: HttpClient) -> tuple[Endpoint, Endpoint, frozenset[int]]:
        target = PacelineEndpoint(client, "smollm2", 1024)
        return OpenAIEndpoint(client, "smollm2", target), target, frozenset()

    (answer,) = run(with_endpoints(url, make), (PROMPT, GREEDY))
    assert (answer.text, list(answer.token_ids)) == plain(url, GREEDY)
    assert answer.accepted > 5


def test_a_lost_draft_costs_speed_only(url: str) -> None:
    async def make(client: HttpClient) -> tuple[Endpoint, Endpoint, frozenset[int]]:
        class Lost(PacelineEndpoint):
            async def draft(self, *args: Any) -> tuple[int, ...]:
                raise EndpointFailed("the server is gone")

        return Lost(client, "smollm2"), PacelineEndpoint(client, "smollm2", 1024), frozenset()

    (answer,) = run(with_endpoints(url, make), (PROMPT, GREEDY))
    assert list(answer.token_ids) == plain(url, GREEDY)[1]
    assert (answer.rounds, answer.drafted) == (24, 0)


def test_wrong_drafts_are_rejected(url: str) -> None:
    async def make(client: HttpClient) -> tuple[Endpoint, Endpoint, frozenset[int]]:
        class Wrong(PacelineEndpoint):
            async def draft(self, ids: Sequence[int], depth: int, *args: Any) -> tuple[int, ...]:
                return (len(ids) % 40,) * depth

        return Wrong(client, "smollm2"), PacelineEndpoint(client, "smollm2", 1024), frozenset()

    (answer,) = run(with_endpoints(url, make), (PROMPT, PENALISED))
    assert list(answer.token_ids) == plain(url, PENALISED)[1]


def test_what_cannot_be_done_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidRequest, match="n to 1"):
        run(Orchestrator.connect(url, url), (PROMPT, SamplingParams(n=2)))
    with pytest.raises(EndpointFailed, match="serves: smollm2"):
        run(Orchestrator.connect(url, url, target_model="gpt"))
    with pytest.raises(EndpointFailed, match="cannot be reached"):
        run(Orchestrator.connect(url, "http://127.0.0.1:9"))

    async def make(client: HttpClient) -> tuple[Endpoint, Endpoint, frozenset[int]]:
        return PacelineEndpoint(client, "smollm2"), LlamaCppEndpoint(client, "smollm2"), frozenset()

    with pytest.raises(EndpointLacks, match="log-probabilities of prompt tokens"):
        run(with_endpoints(url, make), (PROMPT, GREEDY))


def test_another_vocabulary_is_refused_with_the_first_difference(url: str) -> None:
    class Other(PacelineEndpoint):
        async def detokenize(self, ids: Sequence[int]) -> str:
            return await super().detokenize([token + 1 if token >= 5000 else token for token in ids])

    async def check() -> None:
        async with connect(url) as client:
            await check_compatible(await find_endpoint(client), Other(client, "smollm2"))

    with pytest.raises(IncompatibleDraft, match=r"vocabulary: token 5000 is .*sha256"):
        asyncio.run(check())
