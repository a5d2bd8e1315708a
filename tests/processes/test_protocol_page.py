"""The Python code in docs/protocol.md computes what the workers compute, and its tables list the fields of the messages."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from paceline.model_files.tokenizer.compatibility import fingerprint
from paceline.models.loading.load import open_checkpoint
from paceline.speculation.rows.noise import NoiseKey, Purpose, gumbel
from paceline.wire.draft_messages import (
    VERSION,
    Advance,
    Branches,
    Busy,
    Close,
    Drafts,
    Error,
    ErrorCode,
    Goodbye,
    Hello,
    Load,
    Open,
    Ping,
    Pong,
    RoundDraft,
    RoundRequest,
    SequenceBranches,
)
from tests.engine.start.test_build import save_checkpoint

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text("utf-8")


def page_code() -> dict[str, Any]:
    """Names that the code blocks of the page define."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    return names


@pytest.mark.parametrize("key", [NoiseKey(0, 0, 0), NoiseKey(2**63 - 1, 3, 70_000), NoiseKey(42, 1, 511)])
@pytest.mark.parametrize("purpose", [Purpose.SHARED, Purpose.DRAFT])
def test_noise(key: NoiseKey, purpose: Purpose) -> None:
    expected = gumbel([key], purpose, 2000, torch.device("cpu"))[0].tolist()
    noise = page_code()["gumbel"]
    computed = [noise(purpose, *key, token) for token in range(2000)]
    assert computed == pytest.approx(expected, abs=2e-6, rel=1e-5)


def test_vocabulary_checksum(tmp_path: Path) -> None:
    tokenizer = open_checkpoint(save_checkpoint(tmp_path / "model")).read_tokenizer()
    assert page_code()["vocabulary"](tokenizer.vocab) == fingerprint(tokenizer).vocabulary


def fields_on_page(name: str) -> list[str]:
    """Field names in the row of a message or record, or in the sentence `Record NAME: ...`."""
    row = re.search(rf"^\|(?: \d+ \|)? `{name}` \| (.*) \|$", PAGE, re.MULTILINE)
    row = row or re.search(rf"Record `{name}`: ([^.]*)\. ", PAGE)
    assert row is not None, name
    text = re.sub(r"\([^)]*\)", "", row[1])
    return [field.split("=")[0].strip(" `") for field in text.split(",")]


@pytest.mark.parametrize(
    "message",
    [
        *(Hello, Open, Advance, Close, Ping, Goodbye, Drafts, Branches, Busy, Error, Pong),
        *(RoundRequest, RoundDraft, Load, SequenceBranches),
    ],
)
def test_fields_of_messages(message: type[msgspec.Struct]) -> None:
    assert fields_on_page(message.__name__) == list(message.__struct_fields__)


def test_version_and_error_codes() -> None:
    assert f"protocol version, which is {VERSION}" in PAGE
    for code in ErrorCode:
        assert f"| {code.value} | {code.name.lower().replace('_', ' ')} |" in PAGE
