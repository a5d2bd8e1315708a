"""A failure of one request, and the text that its owner receives."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from paceline.core.errors import GenerationFailed, PacelineError, RankLost

logger = logging.getLogger(__name__)


class RequestFailure(NamedTuple):
    """The request has ended; `error` is for its owner only."""

    request_id: str
    error: PacelineError


def owner_error(error: BaseException) -> PacelineError:
    """The error that the owner of the failed request receives. Unexpected errors keep their text in the log."""
    if isinstance(error, PacelineError):
        return error
    kind = type(error).__name__
    failed = GenerationFailed(
        f"the engine failed on this request with {kind}: change its parameters; the log has details"
    )
    failed.__cause__ = error
    return failed


def is_isolated(error: BaseException) -> bool:
    """Whether the error may belong to one request. A panic of a Rust library is no `Exception`."""
    return (isinstance(error, Exception) and not isinstance(error, RankLost)) or type(
        error
    ).__name__ == "PanicException"


@contextmanager
def contained(what: str) -> Iterator[None]:
    """Log an error of the block and continue: what follows does not depend on it."""
    try:
        yield
    except BaseException as error:
        if not is_isolated(error):
            raise
        logger.error("%s failed; the engine continues", what, exc_info=error)
