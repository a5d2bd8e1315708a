from paceline.core.request import Request, SamplingParams
from paceline.worker.server.resumable import ResumableStreams


def request(key: str, **values: object) -> Request:
    return Request("r", (1, 2), SamplingParams(seed=7), resume_key=key, **values)  # type: ignore[arg-type]


def test_tokens_are_kept_for_a_while_after_the_end() -> None:
    streams, running = ResumableStreams(seconds=60), [True]
    stream = streams.keep(request("a", committed=((5, 6),)), lambda: running[0], lambda: None)
    stream.add(0, [7])
    streams.expire(1000.0)
    running[0] = False
    streams.expire(2000.0)
    streams.expire(2060.0)
    found = streams.find("a")
    assert found is not None
    assert (found.seed, [list(tokens) for tokens in found.choices]) == (7, [[5, 6, 7]])
    streams.expire(2061.0)
    assert streams.find("a") is None


def test_the_newest_stream_of_a_key_counts() -> None:
    streams = ResumableStreams()
    streams.keep(request("a"), lambda: True, lambda: None).add(0, [1])
    second = streams.keep(request("a"), lambda: True, lambda: None)
    assert streams.find("a") is second


def test_too_many_tokens_drop_the_oldest_ended_stream() -> None:
    streams = ResumableStreams(max_tokens=10)
    streams.keep(request("running"), lambda: True, lambda: None).add(0, range(8))
    streams.keep(request("old"), lambda: False, lambda: None).add(0, range(2))
    streams.keep(request("new"), lambda: False, lambda: None).add(0, range(2))
    streams.expire(0.0)
    assert [key for key in ("running", "old", "new") if streams.find(key)] == ["running", "new"]
