"""The server's log: JSON lines on standard error. At level `info` it has start, stop and one line per generation."""

import logging
import sys
from typing import TextIO

from paceline.runtime.json_log import JsonFormatter

LOGGERS = ("paceline", "uvicorn", "uvicorn.error", "opentelemetry", "py.warnings")


def configure_logging(level: str, stream: TextIO | None = None, with_texts: bool = False) -> None:
    """Sends the logs of Paceline and uvicorn to `stream` only, by default standard error. The access log is off. uvicorn must
    run with `log_config=None`, or it replaces this configuration."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(with_texts))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        # At `info` uvicorn logs start and stop, which Paceline logs too
        logger.setLevel(logging.WARNING if name != "paceline" and level == "info" else level.upper())
    access = logging.getLogger("uvicorn.access")
    access.handlers, access.propagate, access.disabled = [], False, True
    logging.captureWarnings(True)
