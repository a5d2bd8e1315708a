from collections.abc import Iterator

import pytest

from paceline.core.machine import usable_cores
from paceline.kernels.cpu import native


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    """Tests may change the number of threads; the next one starts from the default."""
    yield
    native.set_num_threads(usable_cores())
