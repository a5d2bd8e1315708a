"""Log records as JSON lines, for servers and workers, or as lines for people.

Only the fields named here leave a record's `extra`, so a log line cannot contain a prompt by accident.
"""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from paceline.core.errors import MissingDependency

try:
    from pythonjsonlogger.core import LogData
    from pythonjsonlogger.json import JsonFormatter as BaseFormatter
except ImportError:
    raise MissingDependency("python-json-logger", "JSON logs", "server") from None

FIELDS = (
    "request_id",
    "model",
    "category",
    "method",
    "path",
    "status",
    "reason",
    "prompt_tokens",
    "output_tokens",
    "seconds",
    "who",
    "flags",
    "address",
    "drafted",
    "accepted",
    "first_token_seconds",
    "trace_id",
)
"""Fields of `extra` that a line may contain."""
TEXT_FIELDS = ("prompt", "answer")
"""Fields of `extra` that a line contains only if texts are enabled."""
RENAMED = {"asctime": "time", "levelname": "level", "name": "logger", "exc_info": "error"}


class JsonFormatter(BaseFormatter):
    """One JSON object per record: time, level, logger, message, the allowed fields and the traceback as `error`."""

    def __init__(self, with_texts: bool = False, worker: str | None = None) -> None:
        """`worker` is the name of the worker, which is added to every line."""
        super().__init__(
            "{asctime}{levelname}{name}{message}",
            style="{",
            rename_fields=RENAMED,
            static_fields={} if worker is None else {"worker": worker},
            json_ensure_ascii=False,
        )
        extra = (*FIELDS, *TEXT_FIELDS) if with_texts else FIELDS
        self._allowed = ("time", "level", "logger", "message", "worker", *extra, "error")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")

    def process_log_record(self, log_data: LogData) -> LogData:
        fields = {name: log_data[name] for name in self._allowed if log_data.get(name) is not None}
        return {**fields, "level": fields["level"].lower()}


def text_line(record: Mapping[str, Any]) -> str:
    """A record of `JsonFormatter` as a line for people: the time of day, the level above `info`, message and fields."""
    moment = datetime.fromisoformat(record["time"]).astimezone().strftime("%H:%M:%S")
    level = "" if record["level"] in ("info", "debug") else f"{record['level']}: "
    fields = "".join(f" {name}={record[name]}" for name in (*FIELDS, *TEXT_FIELDS) if name in record)
    error = f"\n{record['error']}" if "error" in record else ""
    return f"{moment} {level}{record['message']}{fields}{error}"


class TextFormatter(JsonFormatter):
    """One line for people per record."""

    def format(self, record: logging.LogRecord) -> str:
        return text_line(json.loads(super().format(record)))


class _CurrentStderr:
    """Writes to what `sys.stderr` is at the moment: a progress display replaces it while it runs."""

    def write(self, text: str) -> None:
        sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def log_as(worker: str, level: str = "info") -> None:
    """Sends all logs of this process from `level` on to standard error, with the worker's name. Other packages log from level
    `info` on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(worker=worker))
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.INFO), handlers=[handler])
    logging.getLogger("paceline").setLevel(number)
    logging.captureWarnings(True)


LOGGERS = ("paceline", "uvicorn", "uvicorn.error", "opentelemetry", "py.warnings")


def configure_logging(
    level: str, stream: TextIO | None = None, with_texts: bool = False, for_people: bool = False
) -> None:
    """Sends the logs of Paceline and uvicorn to `stream` only, by default standard error, as JSON or as text `for_people`. The
    access log is off. uvicorn must run with `log_config=None`, or it replaces this configuration."""
    handler = logging.StreamHandler(stream or _CurrentStderr())
    handler.setFormatter(TextFormatter(with_texts) if for_people else JsonFormatter(with_texts))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        # At `info` uvicorn logs start and stop, which Paceline logs too
        logger.setLevel(logging.WARNING if name != "paceline" and level == "info" else level.upper())
    access = logging.getLogger("uvicorn.access")
    access.handlers, access.propagate, access.disabled = [], False, True
    logging.captureWarnings(True)
