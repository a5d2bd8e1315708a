from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collecting these tests takes as long as running them: leave them out where no slow test is selected."""
    is_left_out = "not slow" in config.option.markexpr and collection_path.name == "test_openapi_boundaries.py"
    return True if is_left_out else None
