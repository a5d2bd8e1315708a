"""How models write reasoning and calls of tools, and parsers of generated text for each way."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.gateway.formats.calls import ForcedCallParser, ForcedChoiceParser
    from paceline.gateway.formats.choose import AnswerFormat, ReasoningParserName, ToolParserName
    from paceline.gateway.formats.pieces import AnswerParser, CallDelta, Reasoning, Tools
    from paceline.gateway.formats.reasoning import TextParser

__all__ = [
    "AnswerFormat",
    "AnswerParser",
    "CallDelta",
    "ForcedCallParser",
    "ForcedChoiceParser",
    "Reasoning",
    "ReasoningParserName",
    "TextParser",
    "ToolParserName",
    "Tools",
]

__getattr__ = lazy_face(
    __name__,
    {
        "calls": "ForcedCallParser ForcedChoiceParser",
        "choose": "AnswerFormat ReasoningParserName ToolParserName",
        "pieces": "AnswerParser CallDelta Reasoning Tools",
        "reasoning": "TextParser",
    },
)
