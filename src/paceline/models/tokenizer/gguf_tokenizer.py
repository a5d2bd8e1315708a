"""Tokenizers in GGUF metadata: byte-level BPE with merges, and SentencePiece BPE with scores.

`tokenizer.ggml.pre` names the pre-tokenizer that the model was trained with. Unknown names are rejected: another split would
give other tokens.
"""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from paceline.core.errors import UnsupportedModel
from paceline.models.tokenizer.tokenizer import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

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
    fields = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items() if k.startswith("tokenizer.ggml.")}
    if fields.get("model") not in ("gpt2", "llama"):
        raise UnsupportedModel(f"GGUF tokenizer {fields.get('model')!r} is not supported; supported: gpt2, llama")
    tokens: list[str] = fields["tokens"]
    types: list[int] = fields.get("token_type", [1] * len(tokens))
    # Unused entries pad the vocabulary to the size of the embedding; they never occur in text.
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    backend = _byte_level(fields, vocab) if fields["model"] == "gpt2" else _sentencepiece(fields, vocab)
    control = [t for t, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _UNKNOWN)]
    defined = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])

    bos, eos = fields.get("bos_token_id"), fields.get("eos_token_id")
    # Defaults of llama.cpp
    add_bos = fields.get("add_bos_token", fields["model"] == "llama" or fields.get("pre") in ("llama-bpe", "llama3"))
    before = [tokens[bos]] if add_bos and bos is not None else []
    after = [tokens[eos]] if fields.get("add_eos_token", False) and eos is not None else []
    if before or after:
        pairs = [(token, vocab[token]) for token in {*before, *after}]
        backend.post_processor = processors.TemplateProcessing([*before, "$A", *after], special_tokens=pairs)
    names = {"bos_token": bos, "eos_token": eos, "unk_token": fields.get("unknown_token_id")}
    names["pad_token"] = fields.get("padding_token_id")
    return Tokenizer(
        backend,
        bos_id=bos,
        eos_ids={i for i in (eos, fields.get("eot_token_id"), fields.get("eom_token_id")) if i is not None},
        special_tokens={name: tokens[i] for name, i in names.items() if i is not None},
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _byte_level(fields: Mapping[str, Any], vocab: dict[str, int]) -> tokenizers.Tokenizer:
    pre = fields.get("pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedModel(f"GGUF pre-tokenizer {pre!r} is not supported; supported: {', '.join(_PRE_TOKENIZERS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in fields["merges"]]
    # Llama 3 keeps a word that is in the vocabulary whole, even if no merges produce it.
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in ("llama-bpe", "llama3", "llama-v3")))
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(fields: Mapping[str, Any], vocab: dict[str, int]) -> tokenizers.Tokenizer:
    """SentencePiece BPE. The file has no merges: they are all splits of a piece into two known pieces, best score first."""
    scores: list[float] = fields["scores"]
    merges = []
    for piece, index in vocab.items():
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in vocab and piece[i:] in vocab]
        cuts.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
        merges += [(scores[index], cut) for cut in cuts]
    merges.sort(key=lambda merge: -merge[0])
    unknown = fields["tokens"][fields.get("unknown_token_id", 0)]
    model = models.BPE(vocab, [cut for _, cut in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    space_first = fields.get("add_space_prefix", True)
    prepend = [normalizers.Prepend("▁")] if space_first else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if space_first else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend
