"""The error that ended a worker, as its parent reads it."""

from pathlib import Path

import pytest

from paceline.core.errors import InvalidConfig, MissingDependency, OutOfMemory, PacelineError
from paceline.wire.worker_spec import read_error, write_error


@pytest.mark.parametrize("error", [InvalidConfig("no such device"), OutOfMemory("too large"), PacelineError("other")])
def test_type_and_message_are_kept(error: PacelineError, tmp_path: Path) -> None:
    write_error(tmp_path / "error", error)
    found = read_error(tmp_path / "error", "unknown")
    assert (type(found), str(found)) == (type(error), str(error))


def test_other_types_keep_the_message(tmp_path: Path) -> None:
    error = MissingDependency("zmq", "a cluster", "pool")
    write_error(tmp_path / "error", error)
    found = read_error(tmp_path / "error", "unknown")
    assert (type(found), str(found)) == (PacelineError, str(error))
    write_error(tmp_path / "error", ValueError("five"))
    assert str(read_error(tmp_path / "error", "unknown")) == "the worker failed: ValueError('five')"


def test_without_a_file_the_reason_is_unknown(tmp_path: Path) -> None:
    assert str(read_error(tmp_path / "error", "it exited")) == "it exited"
