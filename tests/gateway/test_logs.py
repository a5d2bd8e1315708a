"""The server's log: one JSON object per line, without prompts."""

import io
import json
import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.telemetry.log import LOGGERS, configure_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    names = (*LOGGERS, "uvicorn.access")
    loggers = [logging.getLogger(name) for name in names]
    before = [(one.handlers, one.propagate, one.level, one.disabled) for one in loggers]
    yield io.StringIO()
    logging.captureWarnings(False)
    for logger, (handlers, propagate, level, disabled) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate, logger.disabled = handlers, propagate, disabled
        logger.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_record_is_one_line_with_its_fields(stream: io.StringIO) -> None:
    configure_logging("info", stream)
    log = logging.getLogger("paceline.gateway.sessions.gateway")
    log.info("finished\nin %d steps", 3, extra={"request_id": "r-1", "reason": "stop", "seconds": 0.25})
    (line,) = lines(stream)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "paceline.gateway.sessions.gateway",
        "message": "finished\nin 3 steps",
        "request_id": "r-1",
        "reason": "stop",
        "seconds": 0.25,
    }


def test_other_fields_are_left_out(stream: io.StringIO) -> None:
    configure_logging("info", stream)
    logging.getLogger("paceline").warning("refused", extra={"prompt": "my secret", "request_id": "r"})
    assert "my secret" not in stream.getvalue()
    assert lines(stream)[0]["request_id"] == "r"


def test_an_error_has_its_traceback_on_the_same_line(stream: io.StringIO) -> None:
    configure_logging("info", stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("paceline.engine.loop").exception("the engine failed")
    (line,) = lines(stream)
    assert line["error"].endswith("ValueError: broken")
    assert line["level"] == "error"


def test_levels(stream: io.StringIO) -> None:
    configure_logging("warning", stream)
    log = logging.getLogger("paceline.x")
    log.info("no")
    log.warning("yes")
    assert [line["message"] for line in lines(stream)] == ["yes"]
    configure_logging("debug", stream)
    log.debug("yes, too")
    assert [line["message"] for line in lines(stream)] == ["yes", "yes, too"]


def test_uvicorn_logs_errors_only(stream: io.StringIO) -> None:
    configure_logging("info", stream)
    logging.getLogger("uvicorn.access").error("GET /")
    logging.getLogger("uvicorn.error").info("Started server process")
    assert lines(stream) == []
    logging.getLogger("uvicorn.error").error("address in use")
    assert [line["message"] for line in lines(stream)] == ["address in use"]


def test_warnings_are_log_lines(stream: io.StringIO) -> None:
    configure_logging("info", stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)  # inside: catch_warnings restores the previous state
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert "DeprecationWarning: old" in lines(stream)[0]["message"]


def test_lines_for_people_have_no_braces(stream: io.StringIO) -> None:
    configure_logging("info", stream, for_people=True)
    log = logging.getLogger("paceline.gateway.sessions.gateway")
    log.info("finished", extra={"request_id": "r-1", "prompt": "my secret"})
    log.warning("careful")
    first, second = (line.split(" ", 1) for line in stream.getvalue().splitlines())
    assert re.fullmatch(r"\d\d:\d\d:\d\d", first[0])
    assert (first[1], second[1]) == ("finished request_id=r-1", "warning: careful")
