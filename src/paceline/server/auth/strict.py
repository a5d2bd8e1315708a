"""Strict mode: the target alone generates, and a trail says what was generated, by which model and for whom.

A request leaves two records: `started` before anybody sees a token of it, `finished` before its last byte is sent. Unless the
trail is told to keep texts, neither has a word of it, only hashes: of token ids (sha256 over them as little-endian 64-bit
integers) and of text (over its UTF-8).
"""

import asyncio
import hashlib
import json
import logging
import struct
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from paceline.core.config import EngineConfig
from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.core.sampling import SamplingParams
from paceline.server.auth.audit_log import Trail, TrailNotWritten
from paceline.server.openai.errors import Unavailable

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Output:
    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    text: list[str] = field(default_factory=list)
    finish: str | None = None


class StrictMode:
    """Keeps the trail of one served model."""

    def __init__(self, trail: Trail, model: str, weights: str, engine: EngineConfig) -> None:
        """`weights` is their checksum. The first record of every start says what is served."""
        self.trail, self.model, self.weights = trail, model, weights
        self.decode: Callable[[Sequence[int]], str] | None = None
        """Set where texts are kept beside their hashes: how a prompt's token ids are read."""
        made = {name: getattr(engine, name) for name in ("dtype", "quantization", "kv_dtype")}
        trail.append("opened", model=model, weights=weights, version=version("paceline"), **made)

    @asynccontextmanager
    async def record(self, request_id: str, key: str, requests: Sequence[Request]) -> AsyncIterator["StrictRecord"]:
        """Of one response. Raises `Unavailable`, before anything was sent, when it cannot be kept."""
        record = StrictRecord(self, request_id, requests)
        prompts: list[dict[str, Any]] = [
            {"tokens": len(one.prompt_ids), "token_sha256": token_hash(one.prompt_ids)} for one in requests
        ]
        if self.decode is not None:
            for prompt, one in zip(prompts, requests, strict=True):
                prompt["text"] = self.decode(one.prompt_ids)
        await self.append(
            "started",
            request=request_id,
            key=key,
            model=self.model,
            weights=self.weights,
            prompts=prompts,
            sampling=sampling_record(requests[0].sampling),
        )
        try:
            yield record
        finally:
            await record.finish()

    async def append(self, kind: str, **fields: Any) -> None:
        """Aside: the disk may take its time."""
        try:
            await asyncio.shield(asyncio.to_thread(self.trail.append, kind, **fields))
        except TrailNotWritten as error:
            logger.error("%s", error)
            raise Unavailable("the trail of strict mode cannot be written: the server's log says why") from None


class StrictRecord:
    """What is generated for one response, hashed as it comes."""

    def __init__(self, strict: StrictMode, request_id: str, requests: Sequence[Request]) -> None:
        self._strict, self._id = strict, request_id
        self._outputs = {(one.id, choice): _Output() for one in requests for choice in range(one.sampling.n)}
        self._is_finished = False

    def add(self, outputs: Iterable[StepOutput]) -> None:
        for output in outputs:
            seen = self._outputs[output.request_id, output.choice]
            seen.tokens.extend(output.tokens)
            seen.text.append(output.text)
            seen.finish = output.finish_reason.value if output.finish_reason else None

    async def finish(self) -> None:
        """Once: later calls do nothing. Choices that were given up have no `finish`."""
        if self._is_finished:
            return
        self._is_finished = True
        outputs = [
            {
                "tokens": len(one.tokens),
                "token_sha256": token_hash(one.tokens),
                "text_sha256": text_hash("".join(one.text)),
                "finish": one.finish,
                **({} if self._strict.decode is None else {"text": "".join(one.text)}),
            }
            for one in self._outputs.values()
        ]
        await self._strict.append("finished", request=self._id, outputs=outputs)


def sampling_record(sampling: SamplingParams) -> dict[str, Any]:
    """Numbers as they are; what may hold words, or be long, as a hash."""
    record = asdict(sampling)
    for name in ("stop", "logit_bias", "json_schema"):
        value = record.pop(name)
        record[f"{name}_sha256"] = text_hash(json.dumps(value, sort_keys=True)) if value else None
    return record


def token_hash(tokens: Sequence[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(tokens)}q", *tokens)).hexdigest()


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
