from collections.abc import Iterator

import pytest

from paceline.engine.start.llm import LLM
from tests.tools.audit.tiny import tiny_llm


@pytest.fixture(scope="session")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with tiny_llm(tmp_path_factory.mktemp("models")) as llm:
        yield llm
