"""Checks JSON schemas and grammars in a process with limits of time and memory, before any engine compiles them.

`python -m paceline.requests.schema_check` is that process. It reads one JSON value per line: first the tokenizer and the limit,
then schemas as objects and grammars as strings. It answers each line with one: null, or the error. A child process checks each
schema, so that one which exceeds a limit ends the child alone: reading the tokenizer again would take a second of a processor.
"""

import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import cached_property, partial

from paceline.core.child import LineChild
from paceline.core.errors import InvalidRequest, MissingDependency, PacelineError
from paceline.core.machine import lower_priority
from paceline.core.request import Constraint
from paceline.requests.grammar import Grammar, constraint_text, too_complex

CHECK_SECONDS = 2.0
"""Processor time of one check: on a busy machine a check waits for a processor, and must not fail for that."""
WAIT_SECONDS = 30.0
"""Longest wait for a check."""
START_SECONDS = 60.0
"""Longest start of the process, which reads the tokenizer."""
MEMORY_BYTES = 3 << 30
"""Address space of the process."""
MASK_SECONDS = 0.2
"""Longest processor time of one token's mask: the engine computes it between two steps of all sequences."""
WALKS, WALK_TOKENS = 4, 32
"""Random outputs that a check follows, and the tokens of each."""
WALK_SECONDS = 0.5
"""Processor time after which a check starts no further walk."""
NICE = 5
"""Priority of the process below that of the server: about a quarter of a processor that the engine uses."""
MAX_KNOWN = 1024
"""Schemas and grammars whose result is kept."""


class SchemaChecker:
    """Thread-safe. The process starts with the first schema."""

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        eos_ids: Iterable[int],
        vocab_size: int,
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        """`tokenizer_json` returns the text of a `tokenizer.json`."""
        self._tokenizer_json, self._eos_ids, self._vocab_size = tokenizer_json, sorted(eos_ids), vocab_size
        self._check_seconds = check_seconds
        self._lock = threading.Lock()  # guards the process; a known schema needs no lock
        self._process: LineChild | None = None
        self._known: dict[str, str | None] = {}
        """Errors by schema, None for a good one; the oldest first."""

    def check(self, constraint: Constraint) -> None:
        """Raise `InvalidRequest` if the schema or grammar is invalid, or needs too much time or memory."""
        text = constraint_text(constraint)
        error = self._known.get(text, UNKNOWN)
        if error is UNKNOWN:
            with self._lock:
                error = self._known.get(text, UNKNOWN)
                if error is UNKNOWN:
                    error = self._known[text] = self._ask(text)
                    if len(self._known) > MAX_KNOWN:
                        del self._known[next(iter(self._known))]
        if error is not None:
            raise InvalidRequest(error, field="response_format")

    def close(self) -> None:
        """End the process, and with it a check under way."""
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._stop()

    def _ask(self, text: str) -> str | None:
        answer = self._start().ask([text.encode(), b"\n"], WAIT_SECONDS)
        if not answer:
            self._stop()
            return TOO_LONG
        error: str | None = json.loads(answer)
        return error

    def _start(self) -> LineChild:
        if self._process is not None and self._process.is_running:
            return self._process
        self._stop()
        process = self._process = LineChild([sys.executable, "-m", __name__])
        answer = process.ask([self._first_line, b"\n"], START_SECONDS)
        if not answer:
            self._stop()
            raise PacelineError("the process that checks JSON schemas did not start: see the server's log")
        if (error := json.loads(answer)) is not None:
            self._stop()
            if error == MISSING:
                raise MissingDependency("llguidance", "a JSON schema", "grammar")
            raise InvalidRequest(error, field="response_format")
        return process

    @cached_property
    def _first_line(self) -> bytes:
        """The tokenizer. Writing it takes the interpreter's lock for longer than a step: once is enough."""
        return json.dumps([self._tokenizer_json(), self._eos_ids, self._vocab_size, self._check_seconds]).encode()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()


MISSING = "llguidance is missing"
TOO_LONG = "the JSON schema or grammar is too complex: its check exceeded the limit of time or memory"
UNKNOWN = "not checked yet"


def check_schema(grammar: Grammar) -> None:
    """Raise `InvalidRequest` if a few random outputs of the grammar exceed its limits."""
    rng, began = random.Random(0), time.thread_time()
    for _ in range(WALKS):
        matcher = grammar.matcher()
        for _ in range(WALK_TOKENS):
            if matcher.is_stopped():
                break
            started = time.thread_time()
            mask = matcher.compute_bitmask()
            matcher.try_consume_tokens([_random_token(mask, rng)])
            if time.thread_time() - started > MASK_SECONDS:
                raise too_complex(f"one token takes more than {MASK_SECONDS} s")
        if matcher.is_error():
            raise too_complex(matcher.get_error())
        if time.thread_time() - began > WALK_SECONDS:
            return


def _random_token(mask: bytes, rng: random.Random) -> int:
    """An allowed token; 0 if there is none."""
    start = rng.randrange(len(mask))
    for at in (*range(start, len(mask)), *range(start)):
        if mask[at]:
            return at * 8 + rng.choice([bit for bit in range(8) if mask[at] >> bit & 1])
    return 0


def check_in_child(check: Callable[[], str | None], seconds: float) -> str | None:
    """What `check` returns in a child process; `TOO_LONG` if the child ends before, or needs more processor time."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends a process
            os.write(writer, json.dumps(check()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as file:
        answer = file.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else TOO_LONG


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer_json, eos_ids, vocab_size, seconds = json.loads(sys.stdin.readline())

    def answer(error: str | None) -> None:
        print(json.dumps(error), flush=True)

    def check(line: str) -> str | None:
        try:
            check_schema(Grammar.compile(json.loads(line), tokenizer_json, eos_ids, vocab_size))
        except PacelineError as error:
            return str(error)
        except (MemoryError, RecursionError):
            return "the JSON schema or grammar is too complex: it needs too much memory"
        return None

    try:
        Grammar.prepare(tokenizer_json, eos_ids, vocab_size)
        answer(None)
    except MissingDependency:
        answer(MISSING)
    except PacelineError as error:
        answer(str(error))
    lower_priority(NICE)  # not before: the first schema waits for the start, which happens once
    for line in sys.stdin:
        answer(check_in_child(partial(check, line), seconds))


if __name__ == "__main__":
    main()
