from pathlib import Path

import pytest

from paceline.model_files.tokenizer.tokenizer import Tokenizer
from paceline.tools.train.target import Target
from tests.tools.train.tiny import open_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    open_tiny(folder)
    return folder


@pytest.fixture(scope="session")
def target(tiny_folder: Path) -> Target:
    return open_tiny(tiny_folder)[0]


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return open_tiny(tiny_folder)[1]
