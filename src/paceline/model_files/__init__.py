"""What the files of a model say, read without torch: metadata, tokenizer, chat template, fingerprint."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.model_files.checksums import context_length, quick_checksum, recommended_sampling, weights_checksum
    from paceline.model_files.fingerprint import CHECKSUM_DIGITS, SystemFingerprint
    from paceline.model_files.metadata import MAX_TOKEN_ID, GGUFReader, Metadata, read_json, read_text

__all__ = [
    "CHECKSUM_DIGITS",
    "MAX_TOKEN_ID",
    "GGUFReader",
    "Metadata",
    "SystemFingerprint",
    "context_length",
    "quick_checksum",
    "read_json",
    "read_text",
    "recommended_sampling",
    "weights_checksum",
]

__getattr__ = lazy_face(
    __name__,
    {
        "checksums": "context_length quick_checksum recommended_sampling weights_checksum",
        "fingerprint": "CHECKSUM_DIGITS SystemFingerprint",
        "metadata": "GGUFReader MAX_TOKEN_ID Metadata read_json read_text",
    },
)
