"""Reads a tokenizer.json in a process with limits of time and memory, before the library reads it in this process.

`python -m paceline.model_files.tokenizer.tokenizer_check PATH` is that process: it reads the file, encodes a text that holds
every pattern of the file, and prints null, or the error. The library is native code: a file may make it panic, abort, fill the
memory, or run without end, and no thread of this process could end that.
"""

import json
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.core.child import DEVNULL, PIPE, ChildProcess
from paceline.core.errors import UnsupportedModel
from paceline.model_files import MAX_TOKEN_ID

CHECK_SECONDS = 5
"""Processor time of the check. A tokenizer.json of 262,144 tokens takes about two seconds."""
WAIT_SECONDS = 60.0
"""Longest check on a busy machine."""
MEMORY_BYTES = 4 << 30
"""Address space of the check."""
MAX_GROWTH = 64
"""How many times longer the normalizer may make a text."""
SMALL = 1 << 20
"""Bytes of a file that is not checked if it names none of `RISKS`: its vocabulary is small."""
MAX_KEYS = 1 << 17
"""Keys of a tokenizer.json that are no tokens of its vocabulary, at most."""
RISKS = (b'"Regex"', b'"Replace"', b'"Precompiled"', b'"Prepend"')
"""Parts of tokenizers that run programs of the file: patterns, and texts that replace others."""
PROBE = "The quick brown fox, 123 times: \u00e9\u4f60\u597d\U0001f600\n\t  " + "a" * 64 + " " * 64

_checked: set[tuple[str, int, int]] = set()
"""Path, time and size of the files that passed."""


def check_tokenizer(path: Path) -> None:
    """Raises `UnsupportedModel` for a file that the library cannot read within the limits. A file is checked once."""
    state = path.stat()
    identity = str(path.resolve()), state.st_mtime_ns, state.st_size
    if identity in _checked:
        return
    data = path.read_bytes()
    if len(data) > SMALL or any(risk in data for risk in RISKS):
        num_tokens = data.count(b'":')  # at least: a vocabulary is a mapping
        is_large = num_tokens > MAX_TOKEN_ID + MAX_KEYS
        error = f"it has about {num_tokens} tokens; at most {MAX_TOKEN_ID}" if is_large else _ask(path)
        if error is not None:
            raise UnsupportedModel(f"{path} is not a readable tokenizer ({error}): download it again")
    _checked.add(identity)


def _ask(path: Path) -> str | None:
    child = ChildProcess([sys.executable, "-m", __name__, str(path)], stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL)
    try:
        if child.wait(WAIT_SECONDS) is None:
            return TOO_LONG
        answer = child.read_all()
    finally:
        child.kill()
        child.wait()
        child.close()
    if not answer:  # it exceeded a limit, or the library ended it
        return TOO_LONG
    error: str | None = json.loads(answer)
    return error


TOO_LONG = (
    f"it takes more than {CHECK_SECONDS} s, more than {MEMORY_BYTES >> 30} GiB, or ends the process that reads it"
)


def find_error(path: Path) -> str | None:
    """Why the file is refused; None for a good one. Runs in the process with limits."""
    import tokenizers

    document = json.loads(path.read_bytes())
    if not isinstance(document, dict):
        return "it is no JSON object"
    vocabulary = (document.get("model") or {}).get("vocab") or ()
    if len(vocabulary) > MAX_TOKEN_ID:
        return f"it has {len(vocabulary)} tokens; at most {MAX_TOKEN_ID}"
    parts = [document.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
    growth = 1.0
    for pattern, content in _replacements(parts[0]):
        growth *= max(1.0, len(content) / max(1, len(pattern)))
    if growth > MAX_GROWTH:
        return f"its normalizer makes texts up to {growth:.3g} times as long; at most {MAX_GROWTH} times"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.decode(backend.encode(PROBE + " ".join(_patterns(parts))).ids)
    return None


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _objects(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _objects(inner)


def _replacements(value: Any) -> Iterator[tuple[str, str]]:
    """Patterns and what replaces them; a regular expression may match one character."""
    for part in _objects(value):
        if part.get("type") == "Replace":
            pattern = part.get("pattern") or {}
            yield str(pattern.get("String", "")), str(part.get("content", ""))


def _patterns(value: Any) -> Iterator[str]:
    for part in _objects(value):
        yield from (text for name in ("String", "Regex") if isinstance(text := part.get(name), str))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CHECK_SECONDS, CHECK_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        error = find_error(Path(sys.argv[1]))
    except BaseException as failure:  # a panic of the library is no `Exception`
        error = f"{failure!s:.200}"
    print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
