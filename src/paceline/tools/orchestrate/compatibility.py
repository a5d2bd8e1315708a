"""Whether the draft endpoint has the target endpoint's vocabulary and chat template, as far as their routes allow a comparison.

The vocabulary is compared by the text of every token id, the tokenizer by the ids of sample texts, and the template by the ids
of a sample conversation. A difference costs only acceptance, because the target verifies every token. It is refused all the
same, because ids of another vocabulary are noise.

`find_end_tokens` asks which tokens end a text, of a server that has no route for it. End tokens are control tokens, whose text
is in angle or square brackets. Each such token of the vocabulary is forced as the only output of a completion: the server ends
the text with `stop` at an end token, and with `length` at any other token.
"""

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from paceline.core.errors import IncompatibleDraft
from paceline.tools.orchestrate.endpoint import Endpoint, EndpointFailed, EndpointLacks, Message

CHUNK = 1024
"""Token ids of one /detokenize call."""
MAX_VOCABULARY = 1 << 20
REPLACEMENT = "�"
"""Servers write different numbers of these for the bytes of an incomplete character."""
SAMPLES = (
    "The quick brown fox jumps over the lazy dog.",
    "def f(x):\n    return x ** 2 + 10_000\n\n\t# tabs  and   spaces",
    "naïve café, Straße, Здравствуй, 你好 世界, שלום, 🙂🚀",
    '{"key": [1, 2.50, null], "e-mail": "a.b@c.org"}',
)
CONVERSATION: tuple[Message, ...] = (
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "What is 2 + 2?"},
)


@dataclass(frozen=True, slots=True)
class Check:
    """One part that the two endpoints share, with its sha256 or the reason why it could not be compared."""

    part: str
    checksum: str = ""
    skipped: str = ""

    def __str__(self) -> str:
        return f"{self.part}: " + (f"sha256 {self.checksum[:16]}" if self.checksum else f"not compared, {self.skipped}")


async def check_compatible(target: Endpoint, draft: Endpoint) -> tuple[Check, ...]:
    """The compared parts. Raises `IncompatibleDraft` with the two checksums and the first difference."""
    return (
        await _compare("vocabulary", target, draft, _vocabulary_difference),
        await _compare("tokenizer", target, draft, _sample_difference),
        await _compare("chat template", target, draft, _template_difference),
    )


@dataclass(frozen=True, slots=True)
class _Comparison:
    target: str
    """sha256 of the target's part."""
    draft: str
    difference: str = ""
    """First difference. Empty if there is no difference."""


async def _compare(
    part: str, target: Endpoint, draft: Endpoint, compare: Callable[[Endpoint, Endpoint], Awaitable[_Comparison]]
) -> Check:
    try:
        found = await compare(target, draft)
    except EndpointLacks as error:
        return Check(part, skipped=str(error))
    except EndpointFailed as error:
        if error.status not in (400, 404, 405, 422, 500, 501):
            raise
        return Check(part, skipped=str(error)[:200])
    if found.difference:
        raise IncompatibleDraft(
            f"target and draft differ in their {part}: {found.difference} (sha256 of the target's {found.target}, of the "
            f"draft's {found.draft}); choose a draft of the target's model family"
        )
    return Check(part, found.target)


async def _vocabulary_difference(target: Endpoint, draft: Endpoint) -> _Comparison:
    for endpoint in (target, draft):
        if not endpoint.lists_vocabulary:
            raise EndpointLacks(f"{endpoint} has no safe route for the text of every token id")
    sums = hashlib.sha256(), hashlib.sha256()
    difference = ""
    for start in range(0, MAX_VOCABULARY, CHUNK):
        texts = [await _text(endpoint, start, start + CHUNK) for endpoint in (target, draft)]
        for digest, text in zip(sums, texts, strict=True):
            digest.update((text or "").encode())
        if texts[0] != texts[1] and not difference:
            difference = await _first_difference(target, draft, start, start + CHUNK)
        if not texts[0] or not texts[1]:
            break
    return _Comparison(sums[0].hexdigest(), sums[1].hexdigest(), difference)


async def _first_difference(target: Endpoint, draft: Endpoint, start: int, end: int) -> str:
    """The first token of the range whose text differs, found by halving it. Empty if every single token has the same text: a
    server may join the tokens of a range in its own way."""
    texts = [await _text(endpoint, start, end) for endpoint in (target, draft)]
    if texts[0] == texts[1]:
        return ""
    if end - start == 1:
        named = ["absent" if text is None else repr(text) for text in texts]
        return f"token {start} is {named[0]} in the target and {named[1]} in the draft"
    middle = (start + end) // 2
    first = await _first_difference(target, draft, start, middle)
    return first or await _first_difference(target, draft, middle, end)


async def _text(endpoint: Endpoint, start: int, end: int) -> str | None:
    """The text of these ids as far as the vocabulary reaches. None if it has none of them."""
    try:
        return (await endpoint.detokenize(range(start, end))).replace(REPLACEMENT, "") or None
    except EndpointFailed as error:
        if error.status is None or (start == 0 and error.status == 404):
            raise
    if end - start == 1:
        return None
    middle = (start + end) // 2
    first = await _text(endpoint, start, middle)
    second = await _text(endpoint, middle, end) if first is not None else None
    return first if second is None else (first or "") + second


async def _sample_difference(target: Endpoint, draft: Endpoint) -> _Comparison:
    ids = [[await endpoint.tokenize(text) for text in SAMPLES] for endpoint in (target, draft)]
    for text, ours, theirs in zip(SAMPLES, *ids, strict=True):
        if ours != theirs:
            return _Comparison(_sha256(ids[0]), _sha256(ids[1]), f"in {text!r}, {_first_id(ours, theirs)}")
    return _Comparison(_sha256(ids[0]), _sha256(ids[1]))


async def _template_difference(target: Endpoint, draft: Endpoint) -> _Comparison:
    ours, theirs = [await endpoint.tokenize_messages(CONVERSATION) for endpoint in (target, draft)]
    difference = "" if ours == theirs else f"in a sample conversation, {_first_id(ours, theirs)}"
    return _Comparison(_sha256(ours), _sha256(theirs), difference)


def _first_id(ours: Sequence[int], theirs: Sequence[int]) -> str:
    i = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    a, b = (ids[i] if i < len(ids) else "absent" for ids in (ours, theirs))
    return f"token {i} is {a} in the target and {b} in the draft"


def _sha256(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


END_TOKEN_CHUNK = 1024
CONTROL = re.compile(r"<[^<>\s]{1,40}>|\[[^\[\]\s]{1,40}\]")
CALLS = 8
"""Calls in flight."""


async def find_end_tokens(endpoint: Endpoint) -> frozenset[int]:
    """The end tokens of the model. Raises `EndpointFailed` if the server does not take `logit_bias`."""
    texts = sorted(await _control_texts(endpoint))
    limit = asyncio.Semaphore(CALLS)

    async def end_token(text: str) -> int | None:
        async with limit:
            ids = await endpoint.tokenize(text)
            return ids[0] if len(ids) == 1 and await endpoint.is_end(ids[0]) else None

    found = await asyncio.gather(*map(end_token, texts))
    return frozenset(token for token in found if token is not None)


async def _control_texts(endpoint: Endpoint) -> set[str]:
    """Texts in brackets anywhere in the vocabulary."""
    texts: set[str] = set()
    for start in range(0, MAX_VOCABULARY, END_TOKEN_CHUNK):
        try:
            text = await endpoint.detokenize(range(start, start + END_TOKEN_CHUNK))
        except EndpointFailed as error:
            if error.status is None:
                raise
            text = ""  # the last chunk: the server refuses ids beyond the vocabulary
            for token in range(start, start + END_TOKEN_CHUNK):
                try:
                    text += await endpoint.detokenize([token])
                except EndpointFailed:
                    break
        texts.update(CONTROL.findall(text))
        if not text:
            break
    return texts
