"""The traffic category of a prompt: code, JSON, maths or prose, and the length of its context.

Acceptance differs between categories, so the engine learns it for each. A wrong category costs speed and never changes the
text. The function reads at most 2,048 characters and takes tens of microseconds.
"""

import re
from typing import Literal

Kind = Literal["code", "json", "maths", "prose"]

SAMPLE_CHARS = 1024
"""Characters read from each end."""
MAX_EXERCISE_CHARS = 1200
"""Longest text that counts as a maths exercise."""
TIERS = ((32_768, "-32k"), (4_096, "-long"))
"""Minimum prompt tokens of a long context, and the suffix of its category."""
MIN_SCORE = 2.0
"""Score from which a text is not prose."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[a-z][a-z+#]*")
_NUMBER = re.compile(r"\d+")
_SUM = re.compile(r"\d\s*[+*^=×÷]\s*\(?\d|\b[xyn]\s*[-+*/^=]\s*[\dxyz]|\b[fg]\(x\)")  # noqa: RUF001 people write these signs
"""Without `1-2` and `1/2`, which are scores and dates."""
_LANGUAGES = _words(
    "python javascript typescript java c++ c# rust golang kotlin sql html css bash php haskell cuda regex regexp"
)
_CODE = _words(
    "code coding function functions implement implementation algorithm debug compile compiler script api array arrays loop "
    "recursion recursive def return const import elif variable bug refactor programming bool int void null struct enum async "
    "printf println stdout backend frontend pointer program integers subsequence"
)
_SYNTAX = ("();", "):\n", "{\n", "==", "=>", "->", "::", "</", "#include", ";\n", "!=", "[i]", "+=", "&&")
_SHAPE = _words("yaml schema key keys field fields object objects attributes parse extract")
_MATHEMATICS = _words(
    "equation equations integral derivative theorem polynomial prove proof triangle probability algebra matrix remainder "
    "divisible inequality quadratic logarithm geometry perimeter circumference modulo prime"
)
_LATEX = ("\\frac", "\\sum", "\\int", "\\sqrt", "$$", "\\(", "\\[", "\\cdot")
_EXERCISE = _words(
    "calculate total sum average percent half twice each cost costs spend spent remaining left many much dollars cents hours "
    "minutes days miles feet pounds times double triple fewer more altogether buys sells price pay earns every another "
    "evaluate solve number older younger old age ages combined two three four five six ten money "
    "percentage"
)
_QUESTIONS = ("how many", "how much", "how old", "how far", "how long", "how tall", "what percent", "%")


def categorise(text: str, tokens: int, is_json: bool = False) -> str:
    """Returns `code`, `json`, `maths` or `prose`, with a suffix for long contexts. `is_json` is true if the answer must be
    JSON."""
    kind = "json" if is_json else kind_of(text)
    return kind + next((name for minimum, name in TIERS if tokens >= minimum), "")


def kind_of(text: str) -> Kind:
    sample = text if len(text) <= 2 * SAMPLE_CHARS else f"{text[:SAMPLE_CHARS]}\n{text[-SAMPLE_CHARS:]}"
    lower = sample.lower()
    words = set(_WORD.findall(lower))
    scores: dict[Kind, float] = {
        "code": _code_score(lower, words),
        "json": _json_score(lower, words),
        "maths": _maths_score(lower, words, len(text)),
    }
    kind = max(scores, key=scores.__getitem__)  # on a tie the first: code about JSON is code
    return kind if scores[kind] >= MIN_SCORE else "prose"


def _code_score(lower: str, words: set[str]) -> float:
    syntax = sum(lower.count(mark) for mark in _SYNTAX)
    return 3.0 * ("```" in lower) + min(2.0, 0.5 * syntax) + 1.5 * len(words & _LANGUAGES) + 1.0 * len(words & _CODE)


def _json_score(lower: str, words: set[str]) -> float:
    has_keys = 2.0 * (lower.count('":') >= 2)
    return 2.0 * ("json" in words) + has_keys + 0.5 * len(words & _SHAPE)


def _maths_score(lower: str, words: set[str], length: int) -> float:
    signs = 2.0 * any(mark in lower for mark in _LATEX) + 2.0 * (_SUM.search(lower) is not None)
    exercise = 0.0
    numbers = len(_NUMBER.findall(lower))
    if numbers and length <= MAX_EXERCISE_CHARS:
        is_question = any(question in lower for question in _QUESTIONS)
        exercise = 0.5 + is_question * (0.5 + 0.25 * min(numbers, 4)) + 0.25 * len(words & _EXERCISE)
    return signs + exercise + 1.0 * len(words & _MATHEMATICS)
