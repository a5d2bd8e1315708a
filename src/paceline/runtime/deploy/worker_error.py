"""The error that ended a worker, passed to the process that started it as a file."""

import json
from pathlib import Path

from paceline.core import errors
from paceline.core.errors import PacelineError

KINDS: dict[str, type[PacelineError]] = {
    kind.__name__: kind
    for kind in (
        errors.InvalidConfig,
        errors.UnsupportedModel,
        errors.IncompatibleDraft,
        errors.OutOfMemory,
        errors.EngineClosed,
        errors.RankLost,
    )
}
"""Errors that keep their type: their constructor takes the message only. Others become a `PacelineError`."""


def write_error(path: Path, error: Exception) -> None:
    """Store the error for `read_error`."""
    message = str(error) if isinstance(error, PacelineError) else f"the worker failed: {error!r}"
    path.write_text(json.dumps({"kind": type(error).__name__, "message": message}), "utf-8")


def read_error(path: Path, unknown: str) -> PacelineError:
    """The stored error. Without one, an error with the message `unknown`."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return PacelineError(unknown)
    return KINDS.get(document["kind"], PacelineError)(document["message"])
