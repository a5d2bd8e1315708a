"""The process that checks schemas, with the real llguidance."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from paceline.core.errors import InvalidRequest
from paceline.speculation.verification import schema_check
from paceline.speculation.verification.schema_check import SchemaChecker
from tests.engine.harness import letters
from tests.engine.isolation.test_failures import WIDE

GOOD = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 12}}, "required": ["a"]}


@pytest.fixture
def checker() -> Iterator[SchemaChecker]:
    tokenizer = letters()
    checker = SchemaChecker(tokenizer.to_json, tokenizer.eos_ids, 40)
    yield checker
    checker.close()


def pid(checker: SchemaChecker) -> int:
    assert checker._process is not None
    return checker._process.pid


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (WIDE, "too complex"),
        ({"type": "string", "pattern": "^((a{100}){100}){100}$"}, "too complex"),
        ({"$ref": "#"}, "too complex"),
        ({"type": "nonsense"}, "cannot be used"),
        ({"enum": ["a" * 1_000_000]}, "use at most"),
    ],
    ids=["wide", "pattern", "itself", "invalid", "long"],
)
def test_hostile_schemas_are_refused_and_the_next_one_is_checked(
    checker: SchemaChecker, schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as raised:
        checker.check(schema)
    assert raised.value.field == "response_format"
    assert len(str(raised.value)) < 1000
    checker.check(GOOD)


def test_a_check_that_takes_too_long_ends_its_process(checker: SchemaChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    checker.check(GOOD)
    first = pid(checker)
    monkeypatch.setattr(schema_check, "CHECK_SECONDS", 0.0)
    with pytest.raises(InvalidRequest, match="limit of time or memory"):
        checker.check(WIDE)
    assert not psutil.pid_exists(first)
    monkeypatch.undo()
    checker.check({**GOOD, "title": "another"})


def test_a_process_that_died_is_started_again(checker: SchemaChecker) -> None:
    checker.check(GOOD)
    first = pid(checker)
    os.kill(first, signal.SIGKILL)
    psutil.Process(first).wait(10)
    checker.check({**GOOD, "title": "another"})
    assert pid(checker) != first
    last = pid(checker)
    checker.close()
    assert not psutil.pid_exists(last)


def test_a_known_schema_needs_no_process(checker: SchemaChecker) -> None:
    checker.check(GOOD)
    checker.close()
    checker.check(GOOD)
    assert checker._process is None
