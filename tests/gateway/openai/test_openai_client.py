"""OpenAI's client with a server process and the embedded model."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.engine.start.test_build import save_checkpoint
from tests.gateway.process import Process, server_process
from tests.processes.target_harness import until

MODEL = "smollm2"
ASK = [{"role": "user", "content": "Repeat after me: the cat sat on the mat, the cat sat on the mat, the cat"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    # A fixed depth, so that every machine drafts
    with server_process(**{"speculation.depth": "fixed", "speculation.max_depth": 4}) as process:
        yield process


@pytest.fixture(scope="module")
def client(server: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def chat(client: openai.OpenAI, **options: Any) -> Any:
    options = {"model": MODEL, "messages": ASK, "max_tokens": 24, "temperature": 0, **options}
    return client.chat.completions.create(**options)


def test_chat(client: openai.OpenAI) -> None:
    answer = chat(client)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert 0 < answer.usage.completion_tokens <= 24
    metrics = answer.model_extra["metrics"]["speculative_decoding"]
    assert metrics["num_spec_tokens"] == 4
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_stream_has_the_text_of_the_response(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat(client).choices[0].message.content
    assert chunks[-1].usage.completion_tokens > 0
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    assert chunks[-1].model_extra["metrics"]["speculative_decoding"]["num_spec_tokens"] == 4


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 7}])
def test_the_same_text_with_speculation_on_and_off(client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    prompts = ["1 2 3 4 5 1 2 3 4 5 1 2 3", "the sky is blue, the sky is blue, the sky"]
    texts = []
    for enabled in (True, False):
        answer = client.completions.create(
            model=MODEL, prompt=prompts, max_tokens=16, extra_body={"speculation": {"enabled": enabled}}, **sampling
        )
        texts.append([choice.text for choice in answer.choices])
        drafted = answer.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"]  # type: ignore[index]
        assert (drafted > 0) == enabled
    assert texts[0] == texts[1]


def test_a_json_schema(client: openai.OpenAI) -> None:
    class City(BaseModel):
        name: str
        capital: bool

    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Is Paris a capital? Answer in JSON."}],
        response_format=City,
        max_completion_tokens=60,
        temperature=0,
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_a_json_object(client: openai.OpenAI) -> None:
    answer = chat(client, response_format={"type": "json_object"}, max_tokens=1, temperature=0)
    assert (answer.choices[0].message.content or "").lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools(client: openai.OpenAI, choice: Any) -> None:
    ask = [{"role": "user", "content": "What will the weather be in Rome?"}]
    options = {"messages": ask, "tools": [TOOL], "tool_choice": choice, "max_tokens": 60}
    answer = chat(client, **options).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city", "days"}
    arguments = ""
    for chunk in chat(client, stream=True, **options):
        for delta in chunk.choices[0].delta.tool_calls or ():
            arguments += delta.function.arguments
    assert arguments == call.function.arguments
    again = [*ask, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}]
    assert chat(client, messages=again, tools=[TOOL]).choices[0].message is not None


def test_logprobs(client: openai.OpenAI) -> None:
    choice = chat(client, logprobs=True, top_logprobs=3, max_tokens=5).choices[0]
    content = choice.logprobs.content
    assert len(content) == 5
    assert "".join(item.token for item in content) == choice.message.content
    for item in content:
        assert item.logprob == pytest.approx(max(top.logprob for top in item.top_logprobs))


def test_choices(client: openai.OpenAI) -> None:
    def texts() -> list[str]:
        return [choice.message.content for choice in chat(client, n=3, temperature=1.2, seed=3, max_tokens=8).choices]

    first = texts()
    assert len(set(first)) > 1
    assert texts() == first


def test_errors_raise_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        chat(client, temperature=11)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        chat(client, model="gpt-9")


def test_a_disconnect_frees_the_cache(server: Process, client: openai.OpenAI) -> None:
    stream = chat(client, stream=True, max_tokens=900, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    idle = {f'paceline_{name}{{model="{MODEL}"}} 0.0' for name in ("sequences_running", "kv_blocks_used")}
    until(lambda: idle <= set(httpx.get(server.url + "/metrics").text.splitlines()))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model that loads at once and writes for seconds."""
    shape = {"num_hidden_layers": 16, "max_position_embeddings": 4096}
    model = save_checkpoint(tmp_path_factory.mktemp("models") / "tiny", **shape)
    options = {"served_model_name": "tiny", "draft": "none", "max_model_len": 4096, "kv_tokens": 8192}
    return {"model": model, **options}


def test_sigterm_finishes_streams_and_exits_with_0(tiny: dict[str, Any]) -> None:
    with server_process(**tiny) as process, openai.OpenAI(base_url=process.url + "/v1", api_key="none") as client:
        body: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 400, "extra_body": {"ignore_eos": True}}
        stream = iter(client.completions.create(stream=True, **body))
        first = next(stream)
        process.popen.send_signal(signal.SIGTERM)
        rest = list(stream)
        assert first.choices[0].text
        assert rest[-1].choices[0].finish_reason == "length"
        assert process.popen.wait(30) == 0
        assert process.popen.stderr is not None
        assert process.popen.stderr.read() == ""


def test_a_second_signal_aborts(tiny: dict[str, Any]) -> None:
    with server_process(**tiny | {"log_level": "info"}) as process:
        assert process.popen.stderr is not None
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", process.url + "/v1/completions", json=body, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            process.popen.send_signal(signal.SIGINT)
            assert any(
                '"message": "stopping: waiting' in line for line in process.popen.stderr
            )  # it has the first signal
            process.popen.send_signal(signal.SIGINT)
            data = [line for line in lines if line]
        assert "server stopped" in data[-2]
        assert data[-1] == "data: [DONE]"
        assert process.popen.wait(30) == 1
