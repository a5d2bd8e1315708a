"""The kind of traffic of a prompt whose sender does not say: code, JSON, maths or prose, and how long its context is.

Drafts are accepted to a different degree in each, so acceptance, depth and breaker are kept apart by it. A wrong guess costs
a little speed and never a word. Looks at 2,048 characters at the most and takes some tens of microseconds.
"""

import re
from typing import Literal

Kind = Literal["code", "json", "maths", "prose"]

HALF = 1024
"""Characters looked at from either end."""
WORD_PROBLEM = 1200
"""Characters; a longer text with numbers in it is a report and no exercise."""
TIERS = ((32_768, "-32k"), (4_096, "-long"))
"""Prompt tokens from which on a context is a kind of its own, and what is added to the name."""
ENOUGH = 2.0
"""Points that make a text something else than prose."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[a-z][a-z+#]*")
_NUMBER = re.compile(r"\d+")
_SUM = re.compile(r"\d\s*[+*^=×÷]\s*\(?\d|\b[xyn]\s*[-+*/^=]\s*[\dxyz]|\b[fg]\(x\)")  # noqa: RUF001 as people write it
"""Not `1-2` and `1/2`: those are scores and dates."""
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
_ASKS = ("how many", "how much", "how old", "how far", "how long", "how tall", "what percent", "%")


def categorise(text: str, tokens: int, is_json: bool = False) -> str:
    """`code`, `json`, `maths` or `prose`, with the tier of a context of `tokens`. `is_json`: the answer has to be."""
    kind = "json" if is_json else kind_of(text)
    return kind + next((name for least, name in TIERS if tokens >= least), "")


def kind_of(text: str) -> Kind:
    sample = text if len(text) <= 2 * HALF else f"{text[:HALF]}\n{text[-HALF:]}"
    lower = sample.lower()
    words = set(_WORD.findall(lower))
    points: dict[Kind, float] = {
        "code": _code(lower, words),
        "json": _json(lower, words),
        "maths": _maths(lower, words, len(text)),
    }
    kind = max(points, key=points.__getitem__)  # the first of equals: code about JSON is code
    return kind if points[kind] >= ENOUGH else "prose"


def _code(lower: str, words: set[str]) -> float:
    syntax = sum(lower.count(mark) for mark in _SYNTAX)
    return 3.0 * ("```" in lower) + min(2.0, 0.5 * syntax) + 1.5 * len(words & _LANGUAGES) + 1.0 * len(words & _CODE)


def _json(lower: str, words: set[str]) -> float:
    written = 2.0 * (lower.count('":') >= 2)
    return 2.0 * ("json" in words) + written + 0.5 * len(words & _SHAPE)


def _maths(lower: str, words: set[str], length: int) -> float:
    signs = 2.0 * any(mark in lower for mark in _LATEX) + 2.0 * (_SUM.search(lower) is not None)
    exercise = 0.0
    numbers = len(_NUMBER.findall(lower))
    if numbers and length <= WORD_PROBLEM:
        asked = any(question in lower for question in _ASKS)
        exercise = 0.5 + asked * (0.5 + 0.25 * min(numbers, 4)) + 0.25 * len(words & _EXERCISE)
    return signs + exercise + 1.0 * len(words & _MATHEMATICS)
