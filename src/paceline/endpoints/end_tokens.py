"""Which tokens end a text, asked of a server that has no route for it.

End tokens are control tokens, whose text is in angle or square brackets. Each such token of the vocabulary is forced as the
only output of a completion: the server ends the text with `stop` at an end token, and with `length` at any other token.
"""

import asyncio
import re

from paceline.endpoints.endpoint import Endpoint
from paceline.endpoints.http_client import EndpointFailed

CHUNK = 1024
MAX_VOCABULARY = 1 << 20
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
    for start in range(0, MAX_VOCABULARY, CHUNK):
        try:
            text = await endpoint.detokenize(range(start, start + CHUNK))
        except EndpointFailed as error:
            if error.status is None:
                raise
            text = ""  # the last chunk: the server refuses ids beyond the vocabulary
            for token in range(start, start + CHUNK):
                try:
                    text += await endpoint.detokenize([token])
                except EndpointFailed:
                    break
        texts.update(CONTROL.findall(text))
        if not text:
            break
    return texts
