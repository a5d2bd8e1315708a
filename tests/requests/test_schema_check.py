"""The process that checks schemas, with the real llguidance."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.core.errors import InvalidRequest
from paceline.requests import schema_check
from paceline.requests.schema_check import NICE, SchemaChecker
from tests.engine.harness import letters
from tests.engine.test_failures import WIDE

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


def test_a_hostile_schema_does_not_end_the_process(checker: SchemaChecker) -> None:
    """Its start takes a second of a processor, which the engine may need."""
    checker.check(GOOD)
    first = pid(checker)
    with pytest.raises(InvalidRequest, match="too complex"):
        checker.check(WIDE)
    checker.check({**GOOD, "title": "another"})
    assert pid(checker) == first


def test_a_check_has_a_limit_of_processor_time() -> None:
    tokenizer = letters()
    checker = SchemaChecker(tokenizer.to_json, tokenizer.eos_ids, 40, check_seconds=0.001)
    with pytest.raises(InvalidRequest, match="limit of time or memory"):
        checker.check(WIDE)
    assert psutil.pid_exists(pid(checker))
    checker.close()


def test_a_check_that_does_not_answer_ends_its_process(checker: SchemaChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    checker.check(GOOD)
    first = pid(checker)
    monkeypatch.setattr(schema_check, "WAIT_SECONDS", 0.0)
    with pytest.raises(InvalidRequest, match="limit of time or memory"):
        checker.check(WIDE)
    assert not psutil.pid_exists(first)
    monkeypatch.undo()
    checker.check({**GOOD, "title": "another"})


def test_the_process_yields_to_the_engine(checker: SchemaChecker) -> None:
    """Also where Linux divides the processors between sessions first: the process is alone in its session."""
    checker.check(GOOD)
    assert psutil.Process(pid(checker)).nice() >= min(19, psutil.Process().nice() + NICE)
    group = Path(f"/proc/{pid(checker)}/autogroup")
    if group.exists():
        assert group.read_text().split()[-1] == str(NICE)


def test_the_tokenizer_is_written_once() -> None:
    """It takes the interpreter's lock for as long as a few steps, and a hostile schema ends the process."""
    tokenizer, calls = letters(), []

    def to_json() -> str:
        calls.append(None)
        return tokenizer.to_json()

    checker = SchemaChecker(to_json, tokenizer.eos_ids, 40)
    checker.check(GOOD)
    checker.close()
    checker.check({**GOOD, "title": "another"})
    checker.close()
    assert len(calls) == 1


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
    with checker._lock:  # as while another schema is checked
        checker.check(GOOD)
    assert checker._process is None
