from collections.abc import Iterator

import pytest

from paceline.core.machine import usable_cores
from paceline.kernels.cpu import native


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    """Restore the default number of threads after each test."""
    yield
    native.set_num_threads(usable_cores())
