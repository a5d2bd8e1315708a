"""Logs: one JSON object a line on standard error. At level `info` a server says when it starts and stops, and a line for every
generation."""

import logging
import sys
from typing import TextIO

from paceline.core.json_log import JsonFormatter

LOGGERS = ("paceline", "uvicorn", "uvicorn.error", "opentelemetry", "py.warnings")


def configure_logging(level: str, stream: TextIO | None = None, with_texts: bool = False) -> None:
    """Send our log and uvicorn's to `stream`, standard error if none, and nothing of it anywhere else. Start uvicorn with
    `log_config=None`, so that it leaves this alone; its access log is off."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(with_texts))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        # uvicorn announces every start and stop at `info`; ours says it better
        logger.setLevel(logging.WARNING if name != "paceline" and level == "info" else level.upper())
    access = logging.getLogger("uvicorn.access")
    access.handlers, access.propagate, access.disabled = [], False, True
    logging.captureWarnings(True)
