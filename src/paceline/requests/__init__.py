"""What a request means, read without torch: validation, text and stop strings, grammars, categories."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.requests.categories import categorise
    from paceline.requests.grammar import Grammar
    from paceline.requests.schema_check import SchemaChecker
    from paceline.requests.text import RequestText, TextOutput, Transcript, speculation_metrics
    from paceline.requests.validator import Limits, RequestValidator

__all__ = [
    "Grammar",
    "Limits",
    "RequestText",
    "RequestValidator",
    "SchemaChecker",
    "TextOutput",
    "Transcript",
    "categorise",
    "speculation_metrics",
]

__getattr__ = lazy_face(
    __name__,
    {
        "categories": "categorise",
        "grammar": "Grammar",
        "schema_check": "SchemaChecker",
        "text": "RequestText TextOutput Transcript speculation_metrics",
        "validator": "Limits RequestValidator",
    },
)
