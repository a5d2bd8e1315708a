"""The category of a prompt: kind of text and length of the context."""

import timeit
from typing import Any

import pytest

from paceline.core.config import EngineConfig
from paceline.core.request import MAX_CATEGORIES
from paceline.requests.categories import TIERS, categorise, kind_of
from tests.gateway.fakes import byte_tokenizer, served

CODE = [
    "Write a Python function that returns the n-th Fibonacci number.",
    "Implement a function to find the median of two sorted arrays.",
    "def add(a, b):\n    return a + b\n\nWhy does `add('1', 2)` fail?",
    "What does this do?\n```\nfor (int i = 0; i < n; i++) { sum += a[i]; }\n```",
    "Refactor this query: SELECT name FROM users WHERE id = 3; it is SQL for a backend",
    "Parse this JSON file in Python and write a function for it",
    "template<class T> T max(T a, T b) {\n  return a > b ? a : b;\n}\nstd::cout << max(1, 2);\nif (a == b && c != d) {\n}",
]
JSON = [
    "Extract the names and return them as a JSON object with the keys name and age.",
    'Complete: {"name": "Ann", "age": 31, "tags": ["a"',
    "Return the answer as JSON.",
]
MATHS = [
    "Natalia sold 48 clips in April, and then half as many in May. How many clips did she sell altogether?",
    "Solve the equation x^2 - 5x + 6 = 0.",
    "Given that f(x) = 4x^3 - 9x - 14, find the value of f(2).",
    "Prove the theorem that there are infinitely many prime numbers.",
    "What is \\frac{1}{2} + \\frac{1}{3}?",
    "Weng earns $12 an hour. Yesterday she worked 50 minutes. How much did she earn?",
    "x+y = 4z, x*y = 4z^2, express x-y in z",
]
PROSE = [
    "",
    "Hello!",
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper and her cat.",
    "Translate German to English: Wer hat den Faust geschrieben?",
    "Summarise: Liverpool won 3-1 on 12/05/2019, in front of 45,000 people, and signed a five-year contract afterwards.",
    "When did the American Civil War end, and what followed?",
    "Draft an email to my supervisor about the Quarterly Financial Report.",
    "How many episodes does the series have?",
    "日本の首都はどこですか。",
    "x" * 100_000,
]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (kind, text)
        for kind, texts in (("code", CODE), ("json", JSON), ("maths", MATHS), ("prose", PROSE))
        for text in texts
    ],
)
def test_kinds(kind: str, text: str) -> None:
    assert kind_of(text) == kind


def test_both_ends_of_a_long_text_count() -> None:
    filler = "It was a quiet evening and no word was spoken. " * 200
    question = "\nWrite a Python function that counts the words."
    assert kind_of(filler) == "prose"
    assert kind_of(filler + question) == kind_of(question + filler) == "code"


@pytest.mark.parametrize(
    ("tokens", "name"),
    [(1, "prose"), (4095, "prose"), (4096, "prose-long"), (32767, "prose-long"), (32768, "prose-32k")],
)
def test_long_contexts_have_their_own_categories(tokens: int, name: str) -> None:
    assert categorise("Why is the sky blue?", tokens) == name


def test_a_json_answer_is_json() -> None:
    assert categorise("Write a Python function", 10, is_json=True) == "json"
    assert categorise("", 5000, is_json=True) == "json-long"


def test_the_number_of_categories_is_small() -> None:
    assert 4 * (1 + len(TIERS)) < MAX_CATEGORIES / 2


def test_it_takes_microseconds() -> None:
    """The best of many runs, with a limit of ten times the usual value."""
    text = "\n".join([*CODE, *MATHS, *PROSE])
    assert min(timeit.repeat(lambda: kind_of(text), number=1, repeat=50)) < 2e-3


# --- over HTTP

CHAT = "/v1/chat/completions"


def chat_body(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents]}


@pytest.mark.parametrize(
    ("path", "body", "category"),
    [
        (CHAT, chat_body(CODE[0]), "code"),
        (CHAT, chat_body(CODE[0], "Thank you! And why is the sky blue?"), "prose"),
        (CHAT, {**chat_body("Hi"), "response_format": {"type": "json_object"}}, "json"),
        (CHAT, {**chat_body(CODE[0]), "metadata": {"category": "support"}}, "support"),
        ("/v1/completions", {"prompt": MATHS[0]}, "maths"),
        ("/v1/completions", {"prompt": byte_tokenizer().encode(JSON[0])}, "json"),
        ("/v1/completions", {"prompt": "word " * 1000}, "prose-long"),
    ],
)
def test_requests_without_a_category_get_one(path: str, body: dict[str, Any], category: str) -> None:
    server = served("{}", engine=EngineConfig(model="fake", max_num_seqs=4, max_model_len=8192))
    assert server.post(path, body).status_code == 200
    assert [request.category for request in server.target.requests] == [category]


def test_every_prompt_of_a_body_has_its_category() -> None:
    server = served()
    server.post("/v1/completions", {"prompt": [CODE[0], PROSE[2]]})
    assert [request.category for request in server.target.requests] == ["code", "prose"]
