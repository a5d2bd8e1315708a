"""A stream that one gateway began and another one continues."""

from concurrent.futures import Future
from dataclasses import replace

import pytest

from paceline.core.errors import GenerationFailed
from paceline.targets.pool import TargetPool, TokensReplies, TokensRequests
from paceline.wire.gateway_messages import TokensReply
from tests.engine.harness import PROMPT, SAMPLED, engine_of, outputs_of, request, tokens_of
from tests.processes.target_harness import Members, StreamReader, WorkerThread, cluster, pool_of, until

REQUEST = replace(request("r", PROMPT, **{**SAMPLED, "max_tokens": 24}), resume_key="key")


def test_a_second_gateway_continues_a_stream_of_the_first() -> None:
    expected = tokens_of(outputs_of(engine_of(tokenizer=True), REQUEST), "r")
    worker = WorkerThread("a", steps=6)
    with pool_of(worker) as first:
        second = TargetPool(cluster(), Members(worker))
        try:
            until(lambda: any(target.is_usable for target in second.targets().values()))
            reader = StreamReader(first, REQUEST)
            assert worker.gate is not None
            assert worker.gate.reached.wait(20)
            reader.read()
            seen = len(reader.outputs[0].tokens)
            reply = second.request_tokens("key").result(20)
            assert reply is not None
            assert reply.choices[0][:seen] == expected[:seen]
            assert second.request_tokens("other").result(20) is None
            with pytest.raises(GenerationFailed, match="resumed"):  # it does not run twice
                reader.read_all()
            sampling = replace(REQUEST.sampling, seed=reply.seed)
            rest = StreamReader(second, replace(REQUEST, sampling=sampling, committed=(tuple(expected[:seen]),)))
            worker.gate.open()
            assert expected[:seen] + tokens_of(rest.read_all(), "r") == expected
            again = second.request_tokens("key").result(20)  # also a finished stream is kept
            assert again is not None
            assert again.choices == [expected]
        finally:
            second.close()


def test_the_longest_answer_counts() -> None:
    future: Future[TokensReply | None] = Future()
    answers = TokensReplies(3, deadline=5.0, future=future)
    for answer in (TokensReply(1, None, []), TokensReply(1, 7, [[1, 2], [3]]), TokensReply(1, 7, [[1], []])):
        assert not answers.is_complete(0.0)
        answers.add(answer)
    assert answers.is_complete(0.0)
    answers.finish()
    assert future.result() == TokensReply(1, 7, [[1, 2], [3]])


def test_a_worker_that_does_not_answer_ends_no_recall() -> None:
    future: Future[TokensReply | None] = Future()
    answers = TokensReplies(1, deadline=5.0, future=future)
    assert not answers.is_complete(4.9)
    assert answers.is_complete(5.0)
    answers.finish()
    assert future.result() is None


def test_a_late_answer_is_ignored() -> None:
    requests = TokensRequests({})
    futures: list[Future[TokensReply | None]] = [Future(), Future()]
    for future in futures:
        requests.start("key", future, now=1.0)
    requests.finish_complete(1.0)  # there is no worker to ask
    assert [future.result(0) for future in futures] == [None, None]
    requests.add(TokensReply(1, 7, [[1]]))
    requests.finish_all()
