"""Logs: one JSON object a line on standard error. Quiet: a healthy server at level `info` writes when it starts and stops.

What users write is never logged. Only the fields named here leave a record's `extra`, so a prompt cannot slip in with it.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

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
)
"""What may be given as `extra` to a log call."""

LOGGERS = ("paceline", "uvicorn", "uvicorn.error", "py.warnings")


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(level: str, stream: TextIO | None = None) -> None:
    """Send our log and uvicorn's to `stream`, standard error if none, and nothing of it anywhere else. Start uvicorn with
    `log_config=None`, so that it leaves this alone; its access log is off."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        # uvicorn announces every start and stop at `info`; ours says it better
        logger.setLevel(logging.WARNING if name != "paceline" and level == "info" else level.upper())
    access = logging.getLogger("uvicorn.access")
    access.handlers, access.propagate, access.disabled = [], False, True
    logging.captureWarnings(True)
