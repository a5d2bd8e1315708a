"""Invalid messages of one gateway do not stop a worker or affect other gateways."""

import copy
import random
from typing import Any

import msgspec

from paceline.core.request import Request, SamplingParams, SpeculationFlags
from paceline.wire.draft_messages import Goodbye, Hello
from paceline.wire.gateway_messages import (
    TO_GATEWAY,
    Cancel,
    FromTargetWorker,
    HeartbeatRequest,
    SetFlags,
    StatusRequest,
    Submit,
    WorkerAddress,
    WorkerList,
)
from paceline.wire.transport import Connection
from tests.processes.target_harness import StreamReader, WorkerThread, pool_of, until
from tests.targets.test_target_pool import EXPECTED, REQUESTS, texts

MESSAGES = 20_000
INVALID_VALUES: list[Any] = [
    None,
    -1,
    0,
    1,
    2**31,
    2**63 - 1,
    2**64 - 1,
    1.5,
    float("nan"),
    float("inf"),
    True,
    "",
    "x" * 300,
]
INVALID_VALUES += [
    [],
    [[]],
    [1, 2],
    {},
    {"a": 1},
    b"\xff",
    '{"type": "nonsense"}',
    "[" * 5000,
    "rejection",
    "draft_model",
]


def mutated(rng: random.Random, epoch: int, attempt: int) -> bytes:
    """A message with a few invalid fields, or random bytes."""
    kind = rng.randrange(10)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    sampling = SamplingParams(max_tokens=rng.randint(1, 4), seed=rng.randrange(9))
    request = Request("r", tuple(rng.randrange(45) for _ in range(rng.randrange(6))), sampling)
    submit = Submit(epoch, attempt, request)
    message = rng.choice(
        [
            submit,
            submit,
            submit,
            Cancel([rng.randrange(attempt + 1)]),
            HeartbeatRequest(rng.randrange(9)),
            SetFlags(SpeculationFlags(rng.random() < 0.5, None, 3)),
            WorkerList([WorkerAddress("d", "tcp://127.0.0.1:9", "")]),
            StatusRequest(),
            Hello(rng.randrange(5), 2, None),
            Goodbye(),
        ]
    )
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
        where = fields
        while rng.random() < 0.6:
            inner = rng.choice(list(where.values()) if isinstance(where, dict) else where)
            if not isinstance(inner, list | dict) or not inner:
                break
            where = inner
        key = rng.choice(list(where)) if isinstance(where, dict) else rng.randrange(len(where))
        where[key] = copy.deepcopy(rng.choice(INVALID_VALUES))
    data = msgspec.msgpack.encode(fields)
    return data[: rng.randrange(len(data))] if kind == 1 else data


def test_worker_survives_fuzzed_messages() -> None:
    rng = random.Random(7)
    worker = WorkerThread("a")
    with pool_of(worker) as pool:
        connection: Connection[FromTargetWorker] = Connection(worker.worker.address, TO_GATEWAY)
        try:
            for i in range(MESSAGES):
                connection.socket.send(mutated(rng, worker.worker.epoch, i))
                while connection.receive() is not None:
                    pass
            until(lambda: worker.listener.traffic.received > MESSAGES)
            assert worker.listener.traffic.malformed > MESSAGES // 20
            assert texts(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
            connection.send(Goodbye())
            until(lambda: not worker.engine.has_work)
        finally:
            connection.close()
