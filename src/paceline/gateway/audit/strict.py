"""Strict mode: generation without drafts, recorded in the audit log.

A request has two records: `started` before its first token is sent, and `finished` before its last byte is sent. The records
hold hashes of token ids (sha256 over little-endian 64-bit integers) and of text (sha256 over UTF-8). They hold text only if
`audit_trail_text` is set.
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
from typing import Any

from paceline.core.config import EngineConfig
from paceline.core.output import StepOutput
from paceline.core.request import Request, SamplingParams
from paceline.core.version import VERSION
from paceline.gateway.api.errors import Unavailable
from paceline.gateway.audit.audit_log import AuditLog, AuditWriteError

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _ChoiceOutput:
    """Output of one choice, as far as it is generated."""

    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None


class StrictMode:
    """Writes the audit log of one served model."""

    def __init__(self, log: AuditLog, model: str, weights: str, engine: EngineConfig) -> None:
        """`weights` is the checksum of the weights. Writes the record `opened`, which describes the model."""
        self.log, self.model, self.weights = log, model, weights
        numerics = {name: getattr(engine, name) for name in ("dtype", "quantization", "activations", "kv_dtype")}
        log.append("opened", model=model, weights=weights, version=VERSION, **numerics)

    @asynccontextmanager
    async def record(
        self,
        request_id: str,
        key: str,
        requests: Sequence[Request],
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> AsyncIterator["AuditEntry"]:
        """Writes `started` before the block and `finished` after it. `decode`, if given, adds the texts. Raises `Unavailable`
        if the log cannot be written."""
        entry = AuditEntry(self, request_id, requests, with_text=decode is not None)
        prompts: list[dict[str, Any]] = [
            {"tokens": len(request.prompt_ids), "token_sha256": token_hash(request.prompt_ids)} for request in requests
        ]
        if decode is not None:
            for prompt, request in zip(prompts, requests, strict=True):
                prompt["text"] = decode(request.prompt_ids)
        started = asyncio.create_task(
            self.append(
                "started",
                request=request_id,
                key=key,
                model=self.model,
                weights=self.weights,
                prompts=prompts,
                sampling=sampling_record(requests[0].sampling),
            )
        )
        try:
            await asyncio.shield(started)
            yield entry
        finally:
            await asyncio.wait([started])  # a request cancelled during the write needs its end too
            if started.exception() is None:
                await entry.finish()

    async def append(self, kind: str, **fields: Any) -> None:
        """Writes a record on another thread. Raises `Unavailable` if that fails."""
        try:
            await asyncio.shield(asyncio.to_thread(self.log.append, kind, **fields))
        except AuditWriteError as error:
            logger.error("%s", error)
            raise Unavailable("cannot write the audit log of strict mode: see the server's log") from None


class AuditEntry:
    """Outputs of one response, for its record `finished`."""

    def __init__(self, strict: StrictMode, request_id: str, requests: Sequence[Request], with_text: bool) -> None:
        self._strict, self._id, self._with_text = strict, request_id, with_text
        self._outputs = {
            (request.id, choice): _ChoiceOutput() for request in requests for choice in range(request.sampling.n)
        }
        self._is_finished = False

    def add(self, outputs: Iterable[StepOutput]) -> None:
        for output in outputs:
            choice = self._outputs[output.request_id, output.choice]
            choice.tokens.extend(output.tokens)
            choice.text.append(output.text)
            choice.finish_reason = output.finish_reason.value if output.finish_reason else None

    async def finish(self) -> None:
        """Writes the record once; later calls do nothing. `finish` is null for cancelled choices."""
        if self._is_finished:
            return
        self._is_finished = True
        outputs = [
            {
                "tokens": len(choice.tokens),
                "token_sha256": token_hash(choice.tokens),
                "text_sha256": text_hash("".join(choice.text)),
                "finish": choice.finish_reason,
                **({"text": "".join(choice.text)} if self._with_text else {}),
            }
            for choice in self._outputs.values()
        ]
        await self._strict.append("finished", request=self._id, outputs=outputs)


def sampling_record(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling parameters for a record: numbers as they are, texts and schemas as hashes."""
    record = asdict(sampling)
    for name in ("stop", "logit_bias", "json_schema", "grammar"):
        value = record.pop(name)
        record[f"{name}_sha256"] = text_hash(json.dumps(value, sort_keys=True)) if value else None
    return record


def token_hash(tokens: Sequence[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(tokens)}q", *tokens)).hexdigest()


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
