"""Files that make the tokenizers library run without end, or fill the memory, end in a typed error."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import UnsupportedModel
from paceline.model_files.tokenizer import tokenizer_check
from paceline.model_files.tokenizer.tokenizer import tokenizer_from_folder

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
MODEL = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}


def folder(path: Path, **parts: Any) -> Path:
    document = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": BYTE_LEVEL,
        "decoder": BYTE_LEVEL,
        "model": MODEL,
    }
    (path / "tokenizer.json").write_text(json.dumps({**document, **parts}))
    return path


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BOMBS = {
    "a normalizer that doubles": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 40}},
    "a normalizer that doubles rare text": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{**DOUBLING, "pattern": {"String": "qz"}, "content": "qzqz"}] * 40,
        }
    },
    "a pattern that backtracks": {"pre_tokenizer": split("(a*)*(a*)*(a*)*b")},
    "a pattern with too many levels": {"pre_tokenizer": split("(" * 5000 + "a" + ")" * 5000)},
    "a pattern that no library reads": {"pre_tokenizer": split("(")},
}


@pytest.mark.parametrize("parts", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_a_typed_error(parts: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json is not a readable tokenizer"):
        tokenizer_from_folder(folder(tmp_path, **parts))


def test_a_vocabulary_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_check, "MAX_TOKEN_ID", 1000)
    monkeypatch.setattr(tokenizer_check, "MAX_KEYS", 100)
    monkeypatch.setattr(tokenizer_check, "SMALL", 100)
    began = time.process_time()
    with pytest.raises(UnsupportedModel, match=r"about 3.* tokens; at most 1000"):
        tokenizer_from_folder(folder(tmp_path, model={**MODEL, "vocab": {f"t{i}": i for i in range(3000)}}))
    assert time.process_time() - began < 1


@pytest.mark.parametrize("limit", ["CHECK_SECONDS", "MEMORY_BYTES"])
def test_the_process_has_limits(limit: str, tmp_path: Path) -> None:
    """The child that reads the file is ended by the kernel: here by a limit of one second, or of little memory."""
    work = "while True: pass" if limit == "CHECK_SECONDS" else "bytearray(1 << 33)"
    code = (
        "import sys; from paceline.model_files.tokenizer import tokenizer_check as check\n"
        f"check.CHECK_SECONDS = 1\ncheck.find_error = lambda path: exec({work!r})\nsys.argv = ['', '/']\ncheck.main()"
    )
    child = tokenizer_check.ChildProcess(
        [tokenizer_check.sys.executable, "-c", code], stdin=tokenizer_check.DEVNULL, stdout=tokenizer_check.PIPE
    )
    try:
        code_of_exit = child.wait(60)
        assert (code_of_exit, child.read_all()) == ((-9, b"") if limit == "CHECK_SECONDS" else (0, b'""\n'))
    finally:
        child.kill()
        child.close()


def test_a_good_file_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Path]()
    monkeypatch.setattr(tokenizer_check, "_ask", lambda path: asked.append(path))
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    path = folder(tmp_path, pre_tokenizer=split(gpt2)) / "tokenizer.json"
    for _ in range(2):
        tokenizer_check.check_tokenizer(path)
    assert asked == [path]
    assert tokenizer_check.find_error(path) is None
    folder(tmp_path)  # of a small vocabulary and without a pattern
    tokenizer_check.check_tokenizer(path)
    assert asked == [path]
