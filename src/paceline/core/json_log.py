"""Log records as JSON, one object a line, for servers and workers alike.

What users write is not logged unless that was asked for. Only the fields named here leave a record's `extra`, so a prompt
cannot slip in with it.
"""

import json
import logging
from datetime import UTC, datetime
from typing import Any

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
"""What may be given as `extra` to a log call."""
TEXTS = ("prompt", "answer")
"""And what is dropped from it unless texts are asked for."""


class JsonFormatter(logging.Formatter):
    def __init__(self, with_texts: bool = False, worker: str | None = None) -> None:
        """`worker`: who writes this log, for every line of it."""
        super().__init__()
        self._fields = (*FIELDS, *TEXTS) if with_texts else FIELDS
        self._about = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._about,
        }
        line |= {name: value for name in self._fields if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_as(worker: str) -> None:
    """Everything of this process from level `info` on goes to standard error, in this worker's name."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(worker=worker))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
