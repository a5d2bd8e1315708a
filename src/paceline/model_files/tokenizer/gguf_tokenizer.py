"""Tokenizers in GGUF metadata: byte-level BPE with merges, and SentencePiece BPE with scores.

`tokenizer.ggml.pre` names the pre-tokenizer that the model was trained with. Unknown names are rejected: another split would
give other tokens.

`load_tokenizer` reads the tokenizer of a model, without its weights and without torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from paceline.core.errors import UnsupportedModel
from paceline.model_files import MAX_TOKEN_ID, GGUFReader, Metadata
from paceline.model_files.hub import PREFIX, Inflation, find_checkpoint
from paceline.model_files.tokenizer.tokenizer import Tokenizer, readable_tokenizer, tokenizer_from_folder

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_MAX_PIECE = 1024
"""Characters of the longest piece: finding its splits takes quadratic time. Published vocabularies have at most 128."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _WORDS.format(digits=r"\p{N}{1,3}"), _WORDS.format(digits=r"\p{N}")


def _split(*patterns: str) -> PreTokenizer:
    splits = [Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = ByteLevel(add_prefix_space=False, use_regex=True)
_PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": pre_tokenizers.Sequence([Digits(individual_digits=True), _GPT2]),
    "llama-bpe": _split(_LLAMA3),
    "llama3": _split(_LLAMA3),
    "llama-v3": _split(_LLAMA3),
    "smaug-bpe": _split(_LLAMA3),
    "dbrx": _split(_LLAMA3),
    "glm4": _split(_LLAMA3),
    "chatglm-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
    "default": pre_tokenizers.Sequence(
        [
            Split(Regex(r"[\p{P}\$\+<=>\^~\|]+"), "isolated"),
            Split(Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"), "isolated"),
            Split(Regex(r"\p{N}+"), "isolated"),
            Split(Regex(r"[0-9][0-9][0-9]"), "isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    fields = Metadata(
        "the GGUF header",
        {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items() if key.startswith("tokenizer.")},
    )
    model = fields.text("model", "none")
    if model not in ("gpt2", "llama"):
        raise UnsupportedModel(f"GGUF tokenizer {model!r:.80} is not supported; supported: gpt2, llama")
    tokens: list[str] = fields.array("tokens", str)
    if len(tokens) > MAX_TOKEN_ID:
        raise UnsupportedModel(f"the vocabulary has {len(tokens)} tokens; at most {MAX_TOKEN_ID}")
    types = fields.array("token_type", int, len(tokens)) if "token_type" in fields else [1] * len(tokens)
    # Unused entries pad the vocabulary to the size of the embedding; they never occur in text.
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: _token_id(fields, f"{key}_token_id", len(tokens)) for name, key in names.items()}
    ends = (ids["eos_token"], *(_token_id(fields, f"{key}_token_id", len(tokens)) for key in ("eot", "eom")))
    with readable_tokenizer("the GGUF header"):
        backend = _byte_level(fields, vocab) if model == "gpt2" else _sentencepiece(fields, vocab, tokens)
        control = [t for t, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _UNKNOWN)]
        defined = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
        backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])
        _add_ends(backend, fields, tokens, vocab, model)
        return Tokenizer(
            backend,
            bos_id=ids["bos_token"],
            eos_ids={i for i in ends if i is not None},
            special_tokens={name: tokens[i] for name, i in ids.items() if i is not None},
            chat_template=fields.optional_text("tokenizer.chat_template"),
        )


def _token_id(fields: Metadata, name: str, num_tokens: int) -> int | None:
    return fields.count(name, num_tokens - 1, least=0) if name in fields else None


def _add_ends(
    backend: tokenizers.Tokenizer, fields: Metadata, tokens: list[str], vocab: Mapping[str, int], model: str
) -> None:
    """Makes the tokenizer add the tokens that the model expects before and after a text."""
    bos, eos = fields.token_id("bos_token_id"), fields.token_id("eos_token_id")
    # Defaults of llama.cpp
    has_bos = model == "llama" or fields.text("pre", "default") in ("llama-bpe", "llama3")
    before = [tokens[bos]] if fields.flag("add_bos_token", has_bos) and bos is not None else []
    after = [tokens[eos]] if fields.flag("add_eos_token", False) and eos is not None else []
    if before or after:
        pairs = [(token, vocab[token]) for token in {*before, *after}]
        backend.post_processor = processors.TemplateProcessing([*before, "$A", *after], special_tokens=pairs)


def _byte_level(fields: Metadata, vocab: dict[str, int]) -> tokenizers.Tokenizer:
    pre = fields.text("pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"GGUF pre-tokenizer {pre!r:.80} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}"
        )
    merges = [(first, second) for first, _, second in (merge.partition(" ") for merge in fields.array("merges", str))]
    # Llama 3 keeps a word that is in the vocabulary whole, even if no merges produce it.
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in ("llama-bpe", "llama3", "llama-v3")))
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(fields: Metadata, vocab: dict[str, int], tokens: list[str]) -> tokenizers.Tokenizer:
    """SentencePiece BPE. The file has no merges: they are all splits of a piece into two known pieces, best score first."""
    scores: list[float] = fields.array("scores", (int, float), len(tokens))
    merges = []
    for piece, index in vocab.items():
        if len(piece) > _MAX_PIECE:
            raise UnsupportedModel(f"the vocabulary has a piece of {len(piece)} characters; at most {_MAX_PIECE}")
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in vocab and piece[i:] in vocab]
        cuts.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
        merges += [(scores[index], cut) for cut in cuts]
    merges.sort(key=lambda merge: -merge[0])
    unknown = tokens[_token_id(fields, "unknown_token_id", len(tokens)) or 0]
    model = models.BPE(vocab, [cut for _, cut in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    space_first = fields.flag("add_space_prefix", True)
    prepend = [normalizers.Prepend("▁")] if space_first else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if space_first else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer that `load_model` would return with this model."""
    if str(name_or_path).startswith(PREFIX):
        return load_tokenizer(Inflation.parse(str(name_or_path)).base)
    path = find_checkpoint(name_or_path)
    if path.is_file():
        return tokenizer_from_gguf(GGUFReader(path).metadata)
    return tokenizer_from_folder(path)
