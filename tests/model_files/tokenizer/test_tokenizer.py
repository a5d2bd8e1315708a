"""Goldens hold (text, ids), as transformers encodes them with the same GGUF. Two texts with spaces before digits differ,
because transformers ignores the file's pre-tokenizer; there the ids follow the file.
"""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paceline.core.errors import UnsupportedModel
from paceline.model_files.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from paceline.model_files.tokenizer.tokenizer import Tokenizer, tokenizer_from_folder

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "smollm2_tokens.json").read_text())


@pytest.mark.parametrize(("text", "ids"), GOLDENS, ids=[repr(text[:12]) for text, _ in GOLDENS])
def test_goldens(smollm2: Tokenizer, text: str, ids: list[int]) -> None:
    assert smollm2.encode(text) == ids
    assert smollm2.decode(ids, skip_special=False) == text
    assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()


def test_special_tokens_of_the_embedded_model(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_id == 1
    assert smollm2.eos_ids == {0, 2}  # <|endoftext|> and <|im_end|>; the file declares only the second
    assert smollm2.decode([1, 9690, 2]) == smollm2.decode([9690])
    assert smollm2.token(49152) is None
    assert smollm2.token_bytes(49152) == b""


def test_json_round_trip(smollm2: Tokenizer) -> None:
    again = tokenizers.Tokenizer.from_str(smollm2.to_json())
    for text, ids in GOLDENS:
        assert again.encode(text).ids == ids


def _folder(path: Path, **files: object) -> Path:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<end>", "<|im_end|>"])
    backend.enable_truncation(1)
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_folder_with_all_its_small_files(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "<end>",
        "chat_template": "{{ bos_token }}",
        "pad_token": None,
    }
    folder = _folder(tmp_path, tokenizer_config=config, generation_config={"eos_token_id": [4, 1]})
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.encode("abab<s>") == [2, 2, 3]  # truncation in the file does not apply
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids) == (3, {1, 4, 5}, {3, 4, 5})
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<end>"}
    assert tokenizer.chat_template == "{{ bos_token }}"
    (folder / "chat_template.jinja").write_text("newer")
    assert tokenizer_from_folder(folder).chat_template == "newer"


def test_a_tokenizer_that_fails_for_unknown_characters_is_rejected(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, [], unk_token="<unk>"))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match="<unk>"):
        tokenizer_from_folder(tmp_path)


def test_folder_with_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert tokenizer_from_folder(_folder(tmp_path, tokenizer_config={"chat_template": named})).chat_template == "plain"


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json"):
        tokenizer_from_folder(tmp_path)


SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁a", "▁", "a", "b", "ab"],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1],
    "tokenizer.ggml.scores": [0.0] * 259 + [-1.0, -3.0, -4.0, -5.0, -2.0],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def test_sentencepiece_from_gguf() -> None:
    tokenizer = tokenizer_from_gguf(SENTENCEPIECE)
    assert [tokenizer.token(i) for i in tokenizer.encode("ab bab")] == ["<s>", "▁a", "b", "▁", "b", "ab"]
    for text in ("ab bab", "  a", "é😀 b"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == f"<s> {text}".encode()


def test_unused_tokens_are_not_in_the_vocabulary() -> None:
    fields = dict(SENTENCEPIECE)
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "[PAD264]"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 5]
    fields["tokenizer.ggml.scores"] = [*fields["tokenizer.ggml.scores"], 0.0]
    assert tokenizer_from_gguf(fields).vocab_size == 264


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "viking"}, "viking"),
    ],
)
def test_other_tokenizers_are_rejected_by_name(change: dict, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        tokenizer_from_gguf(SENTENCEPIECE | change)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'ll", " pay", " 12345", "  ", " now", "\n\n"]),
        ("smollm", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "  ", " now", "\n\n"]),
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "45", "  ", " now", "\n\n"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "  ", " now", "\n\n"]),
        ("default", ["I", "'", "ll", " pay", " ", "123", "45", "  ", " now", "\n\n"]),
    ],
)
def test_pre_tokenizers_split_as_the_models_were_trained(pre: str, pieces: list[str]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fields = {"model": "gpt2", "pre": pre, "tokens": alphabet, "merges": []}
    backend = tokenizer_from_gguf({f"tokenizer.ggml.{k}": v for k, v in fields.items()})._backend
    text = "I'll pay 12345   now\n\n"
    assert [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_context_free_text_of_tokens(smollm2: Tokenizer) -> None:
    word, part, end = smollm2.encode(" sky")[0], smollm2.encode("😀")[0], next(iter(smollm2.eos_ids))
    assert (smollm2.context_free_text(word), smollm2.context_free_text(part)) == (" sky", None)
    assert (smollm2.context_free_text(end), smollm2.context_free_text(end, skip_special=False)) == (
        "",
        smollm2.token(end),
    )
    assert tokenizer_from_gguf(SENTENCEPIECE).context_free_text(259) is None  # the first space of a text is stripped


def test_a_tokenizer_without_a_decoder_joins_words() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    words = Tokenizer(backend, bos_id=None, eos_ids=(), special_tokens={}, chat_template=None)
    assert words.context_free_text(1) is None
    assert words.decode([0, 1]) == "one two"
