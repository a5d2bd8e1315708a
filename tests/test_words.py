"""Plain words: the words and names of docs/glossary.md, and none of those they replaced.

`python -m tests.test_words [path ...]` prints every hit, one a line.
"""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent

SUFFIXES = {".c", ".h", ".html", ".js", ".css", ".md", ".py", ".sh", ".toml", ".yaml", ".yml", ""}
SKIPPED = ("src/paceline/gateway/admin/static/vendor/", "tests/fuzz/corpus/", "LICENSE", ".gitignore")
"""Files written elsewhere."""

LISTS = ROOT / "tests" / "data" / "replaced_words.txt"


def _section(name: str) -> tuple[str, ...]:
    _, _, rest = LISTS.read_text("utf-8").partition(f"\n[{name}]")
    return tuple(line for line in rest.partition("\n[")[0].splitlines()[1:] if line)


PROSE, NAMES, IDENTIFIERS = _section("prose"), _section("names"), _section("identifiers")

ALLOWED: tuple[tuple[str, str, str], ...] = ()
"""(file, word, reason). An entry that allows nothing fails the test."""


@dataclass(frozen=True)
class Hit:
    file: str
    line: int
    word: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.word}: {self.text.strip()[:120]}"


def _whole(words: tuple[str, ...], flags: int = 0) -> re.Pattern[str]:
    # A word may be broken over two lines of a comment or a docstring.
    spelled = (re.escape(word).replace(r"\ ", r"[\s#*/]+") for word in words)
    return re.compile(r"(?<!\w)(" + "|".join(spelled) + r")(?!\w)", flags)


_PROSE = _whole(PROSE, re.IGNORECASE)
_NAMES = _whole(NAMES)
_BACKTICKED = re.compile(r"`[^`\n]+`")
_IDENTIFIERS = _whole(IDENTIFIERS)
_PARTS = {word for word in PROSE if " " not in word}
"""Words that are not part of an identifier either, such as the name of a test."""
_LATER_PARTS = re.compile("_(?:" + "|".join(map(re.escape, sorted(_PARTS))) + r")(?![^\W_])")
"""One of them after an underscore. A source without one, and without an identifier, need not be split into tokens."""


def hits_in(file: str, text: str) -> Iterator[Hit]:
    """Every hit in `text`; `file` decides by its suffix how identifiers are found."""
    lines = text.splitlines()

    def hit(start: int, word: str) -> Hit:
        number = text.count("\n", 0, start) + 1
        return Hit(file, number, word, lines[number - 1])

    for match in _PROSE.finditer(text):
        yield hit(match.start(), re.sub(r"[\s#*/]+", " ", match[1].lower()))
    for match in _NAMES.finditer(text):
        yield hit(match.start(), match[1])
    if file.endswith(".py") and (_IDENTIFIERS.search(text) or _LATER_PARTS.search(text)):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                words = [token.string] if token.string in IDENTIFIERS else _PARTS & set(token.string.split("_")[1:])
                yield from (Hit(file, token.start[0], word, token.line) for word in words)
    elif file.endswith(".md"):
        for span in _BACKTICKED.finditer(text):
            for match in _IDENTIFIERS.finditer(span[0]):
                yield hit(span.start() + match.start(), match[1])


@cache
def files() -> tuple[str, ...]:
    """Text files of the repository, those not yet committed included."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return tuple(
        name
        for name in sorted(set(listed.stdout.splitlines()))
        if Path(name).suffix in SUFFIXES and not name.startswith(SKIPPED) and (ROOT / name).is_file()
    )


_CLIPPED = re.compile(r"(?:^|[;.,(] |\"\"\")(?:None|none): |\bbeside\b", re.MULTILINE)
"""A sentence without a verb, "None: …", and a preposition that says too little."""

STILL_TO_DO: tuple[str, ...] = ()
"""Files that may hold such text. The list only shrinks."""


def _texts(file: str, text: str) -> Iterator[tuple[int, str]]:
    """The prose of a file, with the line of its start: a page as a whole, the comments and strings of a Python file."""
    if not file.endswith(".py"):
        yield 1, text
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.endswith('"""')):
            yield token.start[0], token.string


def clipped_sentences(file: str, text: str) -> list[str]:
    return [
        f"{file}:{line + prose.count(chr(10), 0, match.start())}: {match[0].strip()}"
        for line, prose in _texts(file, text)
        for match in _CLIPPED.finditer(prose)
    ]


def test_prose_has_whole_sentences() -> None:
    wrong = [
        line
        for name in files()
        if name.startswith(("src/", "docs/", "benchmarks/", "README.md")) and name.endswith((".py", ".md"))
        if name not in STILL_TO_DO and (ROOT / name).is_file()
        for line in clipped_sentences(name, (ROOT / name).read_text("utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_clipped_sentence_is_found() -> None:
    planted = 'x: int\n"""Seconds; None: no limit."""\ny = {None: 1}  # next to it\n'
    assert clipped_sentences("planted.py", planted) == ["planted.py:2: ; None:"]
    assert clipped_sentences("planted.py", "# a row beside it\n") == ["planted.py:1: beside"]
    assert not clipped_sentences("planted.py", '"""None if there is no limit."""\nx = {None: 1}\n')


@cache
def all_hits() -> list[Hit]:
    present = (name for name in files() if (ROOT / name).is_file())
    return [hit for name in present for hit in hits_in(name, (ROOT / name).read_text("utf-8"))]


def test_text_uses_plain_words_and_current_names() -> None:
    allowed = {(file, word) for file, word, _ in ALLOWED}
    wrong = [hit for hit in all_hits() if (hit.file, hit.word) not in allowed]
    assert not wrong, f"{len(wrong)} hits:\n" + "\n".join(map(str, wrong[:50]))


def test_every_allowed_word_is_used_and_has_a_reason() -> None:
    found = {(hit.file, hit.word) for hit in all_hits()}
    unused = [entry for entry in ALLOWED if entry[:2] not in found or not entry[2]]
    assert not unused, unused


def test_the_checks_see_planted_words() -> None:
    """A check that finds nothing passes: make sure that each kind of hit is found."""
    assert all(len(words) > 15 for words in (PROSE, NAMES, IDENTIFIERS))
    pair = next(word for word in PROSE if " " in word)
    (first, second), prose, name, identifier = pair.split(), PROSE[0], NAMES[0], IDENTIFIERS[0]
    source = f'"""{prose.title()} waits, {first}\n{second}."""\nclass {identifier}:\n    pass  # the {name}\n'
    assert [hit.word for hit in hits_in("planted.py", source)] == [prose, pair, name, identifier]
    markdown = f"A {identifier}, an `x.{identifier}`, a {name}"
    assert [hit.word for hit in hits_in("planted.md", markdown)] == [name, identifier]
    assert [hit.word for hit in hits_in("planted.py", f"def test_{prose}_waits(): ...")] == [prose]
    assert not list(hits_in("planted.py", f"# A {identifier} in a comment, {prose}ish\n{identifier}s = 1\n"))
    assert "src/paceline/engine/engine.py" in files()
    assert "README.md" in files()


if __name__ == "__main__":
    chosen = tuple(sys.argv[1:]) or ("",)
    found = [hit for hit in all_hits() if hit.file.startswith(chosen)]
    print(*found, f"{len(found)} hits", sep="\n")
