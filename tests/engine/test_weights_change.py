"""Other weights for a running engine: between two steps, with the running requests finished or told."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.core.errors import GenerationFailed, InvalidConfig, PacelineError, UnsupportedModel, WeightsChanged
from paceline.core.kv_events import CacheCleared, CacheEvent
from paceline.core.output import OutputEvent
from paceline.core.request import Request
from paceline.engine.loop import EngineLoop
from tests.engine.start.test_build import LETTERS, prompt, save_checkpoint
from tests.engine.test_loop import Inbox
from tests.fakes import tiny_engine, tiny_model

WAIT = 30.0
OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "max_model_len": 256, "audit_fraction": 1.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("weights")
    return {
        "old": save_checkpoint(root / "old"),
        "new": save_checkpoint(root / "new", seed=1),
        "wide": save_checkpoint(root / "wide", intermediate_size=96),
        "letters": save_checkpoint(root / "letters", letters=LETTERS[::-1]),
    }


def sampling(**more: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.8, "seed": 3, "max_tokens": 24, "ignore_eos": True, "logprobs": 2, **more}
    )


def text(llm: LLM, **more: Any) -> Any:
    (found,) = llm.generate([list(prompt(40))], sampling(**more))
    return found.completions[0].token_ids, found.completions[0].logprobs


@pytest.fixture
def expected(folders: dict[str, str]) -> dict[str, Any]:
    found = {}
    for name in ("old", "new"):
        with LLM(folders[name], draft="none", **OPTIONS) as llm:
            found[name] = text(llm), llm.system_fingerprint
    return found


@pytest.mark.parametrize("method", ["suffix", "layer_skip"])
def test_texts_and_fingerprint_are_those_of_the_new_weights(
    folders: dict[str, str], expected: dict[str, Any], method: str
) -> None:
    with LLM(folders["old"], draft="none", speculation={"method": method}, **OPTIONS) as llm:
        assert (text(llm), llm.system_fingerprint) == expected["old"]
        assert llm.snapshot().audit.drifted == 0
        events: list[CacheEvent] = []
        llm.engine.listen(events.append)
        llm.change_weights(folders["new"])
        assert events == [CacheCleared()]
        assert llm.engine.scheduler.tables.pool.num_cached == 0
        assert llm.generate([list(prompt(40))], sampling())[0].num_cached_tokens == 0
        assert (text(llm), llm.system_fingerprint) == expected["new"]
        assert llm.engine.runner.weights_id.startswith(llm.engine.fingerprint.weights)  # type: ignore[union-attr]
        llm.change_weights(folders["old"])
        assert (text(llm), llm.system_fingerprint) == expected["old"]
        llm.finish_idle_work()
        assert llm.snapshot().audit.drifted == 0


@pytest.mark.parametrize(("name", "reason"), [("wide", "layers"), ("letters", "vocabulary"), ("absent", "absent")])
def test_other_models_are_refused_and_nothing_changes(
    folders: dict[str, str], expected: dict[str, Any], name: str, reason: str
) -> None:
    with LLM(folders["old"], draft="none", **OPTIONS) as llm:
        with pytest.raises(PacelineError, match=reason):
            llm.change_weights(folders.get(name, "/nowhere/absent"))
        assert (text(llm), llm.system_fingerprint) == expected["old"]


def test_weights_in_another_format_are_refused(folders: dict[str, str]) -> None:
    with LLM(folders["old"], draft="none", quantization="int8", **OPTIONS) as quantized:
        quantized.change_weights(folders["new"])  # rounded while it is loaded
        model = tiny_model()
        with pytest.raises(UnsupportedModel, match="the models differ in their"):
            quantized._loop.run(lambda: quantized.engine.use_weights(model, ""))


def test_cache_tiers_and_running_requests_are_refused(folders: dict[str, str]) -> None:
    with (
        LLM(folders["old"], draft="none", kv_host_bytes=1 << 20, **OPTIONS) as llm,
        pytest.raises(InvalidConfig, match="kv_host_bytes"),
    ):
        llm.change_weights(folders["new"])
    engine = tiny_engine(tiny_model())
    engine.add(engine.validate(Request("r", tuple(range(9)), SamplingParams(max_tokens=4))))
    with pytest.raises(PacelineError, match="while no request runs"):
        engine.use_weights(tiny_model(), "")


class Gated:
    """A loop whose engine stops before a step until it is opened."""

    def __init__(self) -> None:
        self.engine = tiny_engine(tiny_model(), max_num_seqs=4)
        self.open, self.reached = threading.Event(), threading.Event()
        advance = self.engine.advance

        def gated() -> Any:
            self.reached.set()
            assert self.open.wait(WAIT)
            return advance()

        self.engine.advance = gated  # type: ignore[method-assign]
        self.loop = EngineLoop(self.engine)

    def submit(self, name: str, listener: Any, count: int = 6) -> None:
        request = Request(name, tuple(range(12)), SamplingParams(max_tokens=count, seed=1, ignore_eos=True))
        self.loop.submit(self.engine.validate(request), listener)


@pytest.fixture
def gated() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.open.set()
    made.loop.close()


def test_requests_before_are_finished_and_later_ones_wait(gated: Gated) -> None:
    before, after, seen = Inbox(), Inbox(), []
    gated.submit("before", before)
    assert gated.reached.wait(WAIT)
    inside, leave = threading.Event(), threading.Event()

    def change() -> None:
        with gated.loop.alone(WAIT, WeightsChanged()):
            seen.append(gated.engine.has_work)
            inside.set()
            assert leave.wait(WAIT)

    thread = threading.Thread(target=change)
    thread.start()
    gated.open.set()
    assert len(before.tokens()[0]) == 6
    assert inside.wait(WAIT)
    gated.submit("after", after)
    gated.loop.run(lambda: None)  # the request has arrived
    assert seen == [False]
    assert not gated.engine.has_work
    with pytest.raises(PacelineError, match="under way"), gated.loop.alone(WAIT, WeightsChanged()):
        pass
    cancelled = Inbox()
    gated.submit("cancelled", cancelled)
    gated.loop.cancel("cancelled")
    leave.set()
    thread.join(WAIT)
    assert len(after.tokens()[0]) == 6
    assert "cancelled" not in gated.engine.requests.sequences


def test_requests_that_take_too_long_are_told(gated: Gated) -> None:
    events: list[OutputEvent] = []
    told = threading.Event()

    def listen(event: OutputEvent) -> None:
        events.append(event)
        if isinstance(event, PacelineError):
            told.set()

    gated.submit("long", listen, count=200)
    assert gated.reached.wait(WAIT)
    gated.open.set()
    with gated.loop.alone(0.0, WeightsChanged()):
        assert not gated.engine.has_work
    assert told.wait(WAIT)
    assert isinstance(events[-1], WeightsChanged)
    assert isinstance(events[-1], GenerationFailed)
    assert "send the request again" in str(events[-1])
    inbox = Inbox()
    gated.submit("next", inbox)
    assert len(inbox.tokens()[0]) == 6
