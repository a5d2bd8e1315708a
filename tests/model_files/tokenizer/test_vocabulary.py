"""The vocabulary in the files of a model is that of the tokenizer made of them."""

import time
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paceline.core.errors import IncompatibleDraft, UnsupportedModel
from paceline.model_files.hub.hub import find_checkpoint
from paceline.model_files.tokenizer.gguf_tokenizer import load_tokenizer
from paceline.model_files.tokenizer.vocabulary import Vocabulary, check_pair, check_vocabularies, read_vocabulary


def save(folder: Path, letters: str, added: tuple[str, ...] = ()) -> Path:
    folder.mkdir()
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(added))
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_a_gguf_header_has_the_vocabulary_of_its_tokenizer() -> None:
    assert read_vocabulary(find_checkpoint("smollm2")) == Vocabulary.of(load_tokenizer("smollm2"))


def test_a_folder_has_the_vocabulary_of_its_tokenizer(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "abc", ("<end>",))
    assert read_vocabulary(folder) == Vocabulary.of(load_tokenizer(folder))


def test_bytes_are_compared_if_the_spelling_differs() -> None:
    spaces = Vocabulary({0: "▁a", 1: "<0x0A>", 2: "é"}, False)
    level = Vocabulary({0: "Ġa", 1: "Ċ", 2: "Ã©"}, True)
    assert check_vocabularies(spaces, level) == 0
    with pytest.raises(IncompatibleDraft):
        check_vocabularies(spaces, Vocabulary({0: "a", 1: "Ċ", 2: "Ã©"}, True))


@pytest.mark.parametrize("text", ["", "[]", '{"model": {}}', '{"model": {"vocab": []}}'])
def test_a_file_without_a_vocabulary_is_left_to_the_loader(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    assert read_vocabulary(tmp_path) is None


def test_a_pair_is_refused_by_its_files(tmp_path: Path) -> None:
    target, other = save(tmp_path / "target", "abcd"), save(tmp_path / "other", "dcba")
    check_pair(str(target), str(save(tmp_path / "draft", "abcd", ("<x>",))))
    started = time.process_time()
    for model, draft in ((str(target), str(other)), ("smollm2", str(target))):
        with pytest.raises(IncompatibleDraft):
            check_pair(model, draft)
    assert time.process_time() - started < 2.0
    check_pair(str(target), None)
    check_pair(str(target), "none")
    with pytest.raises(UnsupportedModel, match="no draft at"):
        check_pair(str(target), "/nowhere")


def test_a_trained_draft_has_no_vocabulary_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    check_pair("smollm2", str(tmp_path / "head"))
