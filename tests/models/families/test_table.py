"""The table of families in the documentation is current."""

import importlib.util
from pathlib import Path

import pytest

from tests.kernels.cases import needs_native

SCRIPT = Path(__file__).parents[3] / "docs" / "family_table.py"


@needs_native
def test_the_table_of_families_is_current() -> None:
    pytest.importorskip("triton")
    found = importlib.util.spec_from_file_location("family_table", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    text = module.PAGE.read_text("utf-8")
    assert text == module.page(text), "run `python docs/family_table.py`"
