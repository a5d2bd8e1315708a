"""Tokenizer, chat template, incremental detokenisation, and whether two tokenizers are the same."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.model_files.tokenizer.chat_template import ChatTemplate
    from paceline.model_files.tokenizer.compatibility import (
        Fingerprint,
        check_compatible,
        describe_mismatch,
        fingerprint,
        vocabulary_checksum,
    )
    from paceline.model_files.tokenizer.gguf_tokenizer import load_tokenizer, tokenizer_from_gguf
    from paceline.model_files.tokenizer.tokenizer import TextStream, Tokenizer, tokenizer_from_folder
    from paceline.model_files.tokenizer.vocabulary import check_pair

__all__ = [
    "ChatTemplate",
    "Fingerprint",
    "TextStream",
    "Tokenizer",
    "check_compatible",
    "check_pair",
    "describe_mismatch",
    "fingerprint",
    "load_tokenizer",
    "tokenizer_from_folder",
    "tokenizer_from_gguf",
    "vocabulary_checksum",
]

__getattr__ = lazy_face(
    __name__,
    {
        "chat_template": "ChatTemplate",
        "compatibility": "Fingerprint check_compatible describe_mismatch fingerprint vocabulary_checksum",
        "gguf_tokenizer": "load_tokenizer tokenizer_from_gguf",
        "tokenizer": "TextStream Tokenizer tokenizer_from_folder",
        "vocabulary": "check_pair",
    },
)
