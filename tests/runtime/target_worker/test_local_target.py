"""An in-process engine behind the interface of a target worker."""

from queue import SimpleQueue

import pytest

from paceline.core.config import EngineConfig
from paceline.core.errors import EngineClosed, InvalidRequest, PacelineError
from paceline.core.output import StepOutput
from paceline.core.speculation import SpeculationFlags
from paceline.runtime.gateway_client.target_client import TargetClient
from paceline.runtime.target_worker.local_target import LocalTarget
from tests.engine.harness import GREEDY, PROMPT, engine_of, plain_tokens, request
from tests.runtime.target_harness import until


def local_target() -> LocalTarget:
    return LocalTarget(EngineConfig(model="tiny", max_num_seqs=8), engine_of(tokenizer=True))


def test_outputs_are_those_of_the_engine() -> None:
    events: SimpleQueue[StepOutput | PacelineError] = SimpleQueue()
    with local_target() as target:
        client: TargetClient = target
        assert (client.is_running, client.is_ready, client.max_num_seqs) == (True, True, 8)
        client.submit(request("r", PROMPT, max_tokens=6, **GREEDY), events.put)
        tokens: list[int] = []
        is_finished = False
        while not is_finished:
            event = events.get(timeout=30)
            assert isinstance(event, StepOutput)
            tokens += event.tokens
            is_finished = event.finish_reason is not None
        assert tokens == plain_tokens(max_tokens=6, **GREEDY)
        assert client.cluster_status() is None


def test_invalid_requests_and_flags_raise() -> None:
    with local_target() as target:
        with pytest.raises(InvalidRequest):
            target.submit(request("r", [4000], max_tokens=3), print)
        with pytest.raises(InvalidRequest):
            target.validate(request("r", [4000], max_tokens=3))
        with pytest.raises(InvalidRequest):
            target.set_flags(SpeculationFlags(method="unknown"))
        target.set_flags(SpeculationFlags(enabled=False))
        until(lambda: target.engine_status().flags.enabled is False)


def test_cancel_frees_the_engine_and_close_ends_it() -> None:
    target = local_target()
    target.submit(request("r", PROMPT, max_tokens=200, **GREEDY), lambda event: None)
    target.cancel("r")
    target.cancel("unknown")
    until(lambda: not target.engine.has_work)
    target.close()
    assert not target.is_running
    target.cancel("r")
    with pytest.raises(EngineClosed):
        target.submit(request("s", PROMPT, max_tokens=3, **GREEDY), print)
