"""The kinds of servers that can be endpoints: llama.cpp, Paceline, vLLM and other OpenAI-compatible servers.

llama.cpp has two servers: its own (`llama-server`) and that of llama-cpp-python. An `OpenAIEndpoint` only drafts: text in, text
out. `pick` computes the target's own tokens from log-probabilities, and `accept` the accepted part of a draft.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from paceline.core.request import SamplingParams
from paceline.core.sequence import FinishReason
from paceline.tools.orchestrate.endpoint import (
    Endpoint,
    EndpointFailed,
    EndpointLacks,
    EndpointRound,
    HttpClient,
    Message,
    Outcome,
)


class OpenAIEndpoint(Endpoint):
    """Drafts with text, which the target's tokenizer converts. A draft with other tokens costs speed and does not change the
    text."""

    kind = "an OpenAI-compatible server"

    def __init__(self, client: HttpClient, model: str, tokenizer: Endpoint) -> None:
        """`tokenizer` is the endpoint that converts between text and token ids."""
        super().__init__(client, model)
        self._tokenizer = tokenizer

    async def tokenize(self, text: str) -> list[int]:
        raise EndpointLacks(f"{self} has no route for token ids")

    async def tokenize_prompt(self, text: str) -> list[int]:
        raise EndpointLacks(f"{self} has no route for token ids")

    async def tokenize_messages(self, messages: Sequence[Message]) -> list[int]:
        raise EndpointLacks(f"{self} has no route for token ids")

    async def detokenize(self, ids: Sequence[int]) -> str:
        raise EndpointLacks(f"{self} has no route for token ids")

    async def draft(self, ids: Sequence[int], depth: int, sampling: SamplingParams, timeout: float) -> tuple[int, ...]:
        text = await self._tokenizer.detokenize(ids)
        body = {"prompt": text, "max_tokens": depth, "temperature": 0}
        drafted = str((await self.complete(body, timeout))["text"])
        return await continuation(self._tokenizer, ids, text, drafted, depth)


async def continuation(tokenizer: Endpoint, ids: Sequence[int], text: str, drafted: str, depth: int) -> tuple[int, ...]:
    """At most `depth` tokens of `drafted`, which continues `text`, the text of `ids`."""
    if not drafted:
        return ()
    tokens = await tokenizer.tokenize(text + drafted)
    if tokens[: len(ids)] == list(ids):
        return tuple(tokens[len(ids) : len(ids) + depth])
    return tuple((await tokenizer.tokenize(drafted))[:depth])


class LlamaCppEndpoint(Endpoint):
    """Drafts by token ids. It does not verify, because the server has no log-probabilities of prompt tokens."""

    kind = "llama.cpp's server"

    async def tokenize(self, text: str) -> list[int]:
        body = {"content": text, "add_special": False, "parse_special": True}
        return list((await self._client.post("/tokenize", body))["tokens"])

    async def tokenize_prompt(self, text: str) -> list[int]:
        body = {"content": text, "add_special": True, "parse_special": True}
        return list((await self._client.post("/tokenize", body))["tokens"])

    async def tokenize_messages(self, messages: Sequence[Message]) -> list[int]:
        rendered = await self._client.post("/apply-template", {"messages": list(messages)})
        return await self.tokenize(rendered["prompt"])

    async def detokenize(self, ids: Sequence[int]) -> str:
        return str((await self._client.post("/detokenize", {"tokens": list(ids)}))["content"])

    async def draft(self, ids: Sequence[int], depth: int, sampling: SamplingParams, timeout: float) -> tuple[int, ...]:
        body = {
            "prompt": list(ids),
            "n_predict": depth,
            "temperature": 0,
            "return_tokens": True,
            "cache_prompt": True,
            "ignore_eos": sampling.ignore_eos,
        }
        return tuple((await self._client.post("/completion", body, timeout))["tokens"][:depth])

    def refusal(self, sampling: SamplingParams) -> str | None:
        return (
            f"{self.kind} returns no log-probabilities of prompt tokens, so it cannot score a draft in one call: use it as "
            "the draft"
        )


class LlamaCppPythonEndpoint(Endpoint):
    """Drafts with text. It does not verify, because its log-probabilities name tokens by text."""

    kind = "llama-cpp-python's server"

    async def tokenize(self, text: str) -> list[int]:
        return list((await self._client.post("/extras/tokenize", {"input": text}))["tokens"])

    async def tokenize_prompt(self, text: str) -> list[int]:
        return await self.tokenize(text)

    async def tokenize_messages(self, messages: Sequence[Message]) -> list[int]:
        raise EndpointLacks(f"{self} has no route that renders a chat template")

    async def detokenize(self, ids: Sequence[int]) -> str:
        return str((await self._client.post("/extras/detokenize", {"tokens": list(ids)}))["text"])

    async def draft(self, ids: Sequence[int], depth: int, sampling: SamplingParams, timeout: float) -> tuple[int, ...]:
        text = await self.detokenize(ids)
        body = {"prompt": text, "max_tokens": depth, "temperature": 0}
        drafted = str((await self.complete(body, timeout))["text"])
        return await continuation(self, ids, text, drafted, depth)

    def refusal(self, sampling: SamplingParams) -> str | None:
        return (
            f"{self.kind} takes text and names log-probabilities by text, so that drafted token ids cannot be verified: "
            "use it as the draft"
        )

    @property
    def lists_vocabulary(self) -> bool:
        return False  # an id beyond the vocabulary ends the server


SHARED_PARAMS = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Parameters by which a draft follows the target's noise."""
VERIFIED_PARAMS = (
    *SHARED_PARAMS,
    "max_tokens",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)


class PacelineEndpoint(Endpoint):
    """Verifies through /v1/verify, with every sampling parameter."""

    kind = "Paceline"

    async def draft(self, ids: Sequence[int], depth: int, sampling: SamplingParams, timeout: float) -> tuple[int, ...]:
        body: dict[str, Any] = {name: getattr(sampling, name) for name in SHARED_PARAMS}
        body |= {"prompt": list(ids), "max_tokens": depth, "return_token_ids": True, "ignore_eos": sampling.ignore_eos}
        return tuple((await self.complete(body, timeout))["token_ids"])

    def refusal(self, sampling: SamplingParams) -> str | None:
        return None

    async def verify(self, round_: EndpointRound) -> Outcome:
        sampling = round_.sampling
        body: dict[str, Any] = {name: getattr(sampling, name) for name in VERIFIED_PARAMS}
        body |= {
            "model": self.model,
            "prompt": list(round_.prompt),
            "output": list(round_.output),
            "draft": list(round_.draft),
            "stop_token_ids": list(sampling.stop_token_ids),
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        }
        if sampling.json_schema is not None:
            schema = {"name": "output", "schema": dict(sampling.json_schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if sampling.grammar is not None:
            body["structured_outputs"] = {"grammar": sampling.grammar}
        answer = await self._client.post("/v1/verify", body)
        reason = answer["finish_reason"]
        return Outcome(tuple(answer["tokens"]), answer["accepted"], FinishReason(reason) if reason else None)

    @property
    def reports_ends(self) -> bool:
        return True


_MASK_32, _MASK_64 = 2**32 - 1, 2**64 - 1


def gumbel(seed: int, position: int, token: int) -> float:
    """Standard Gumbel noise of one token of the first choice, without torch.

    The function is the same as in `speculation/rows/noise.py`, and a test compares their values. So a text that is
    sampled from another engine's log-probabilities uses the noise of our engine at the same seed and position."""
    a, b, c = _words(seed, position)
    bits = _avalanche(((_avalanche(token) ^ a) * (b | 1)) & _MASK_32) ^ c
    u = min((bits + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -math.log(-math.log1p(-u))


@lru_cache(maxsize=64)
def _words(seed: int, position: int) -> tuple[int, int, int]:
    """The key bits of a position."""
    state = 0
    for part in (0, seed, 0):  # purpose, seed, choice
        state = _splitmix(state ^ part)
    low = _splitmix(state ^ position)
    return low & _MASK_32, low >> 32, _splitmix(low) & _MASK_32


def _avalanche(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK_32
    x = ((x ^ (x >> 15)) * 0xD35A2D97) & _MASK_32
    return x ^ (x >> 15)


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


MAX_TOP = 20
"""Alternatives that servers report for one token unless configured otherwise."""


def refuse_processed(sampling: SamplingParams, kind: str) -> str | None:
    """The reason why raw log-probabilities do not determine `p` with these parameters. None if they do."""
    causes = {
        "penalties": sampling.has_penalties,
        "logit_bias": bool(sampling.logit_bias),
        "a JSON schema": sampling.json_schema is not None,
        "a grammar": sampling.grammar is not None,
        "min_tokens": sampling.min_tokens > 0,
    }
    names = [name for name, is_set in causes.items() if is_set]
    if names:
        return f"{kind} reports log-probabilities without {' and '.join(names)}: remove them, or use a Paceline target"
    if not sampling.is_greedy and not 1 <= sampling.top_k <= MAX_TOP:
        return (
            f"{kind} reports {MAX_TOP} log-probabilities for a token, and sampling needs all that it may choose: "
            f"set top_k to at most {MAX_TOP}, temperature to 0, or use a Paceline target"
        )
    return None


def pick(row: Mapping[int, float], sampling: SamplingParams, position: int) -> int:
    """argmax(log p + G) over the most likely tokens {id: log-probability}. Under greedy sampling it is the most likely token,
    and at a tie the lowest id.

    `row` holds at least `top_k` tokens. `position` is that of the token to be chosen, prompt included.
    """
    ranked = sorted(row.items(), key=lambda item: (-item[1], item[0]))
    if sampling.is_greedy:
        return ranked[0][0]
    assert sampling.seed is not None
    best = ranked[0][1]
    scores = [(token, (score - best) / sampling.temperature) for token, score in ranked[: sampling.top_k]]
    floor = math.log(sampling.min_p) if sampling.min_p else -math.inf
    scores = [(token, score) for token, score in scores if score >= floor]
    total, before, kept = sum(math.exp(score) for _, score in scores), 0.0, []
    for token, score in scores:
        if sampling.top_p < 1.0 and before >= sampling.top_p * total:
            break
        kept.append((token, score))
        before += math.exp(score)
    return max(kept, key=lambda item: item[1] + gumbel(sampling.seed or 0, position, item[0]))[0]


def accept(round_: EndpointRound, picks: Sequence[int]) -> Outcome:
    """The outcome of a round whose rows have these picks: after the committed tokens, then after each drafted one. `picks` may
    end after the first that differs from the draft."""
    accepted = 0
    while accepted < len(round_.draft) and picks[accepted] == round_.draft[accepted]:
        accepted += 1
    tokens = (*round_.draft[:accepted], picks[accepted])
    for count, token in enumerate(tokens, 1):
        if token in round_.ends and not round_.sampling.ignore_eos:
            return Outcome(tokens[:count], accepted, FinishReason.STOP)
        if token in round_.sampling.stop_token_ids:
            return Outcome(tokens[:count], accepted, FinishReason.STOP)
        if count >= round_.room:
            return Outcome(tokens[:count], accepted, FinishReason.LENGTH)
    return Outcome(tokens, accepted)


TOKEN_ID = "token_id:"
"""Prefix of a token id in place of a token's text."""


class VllmEndpoint(Endpoint):
    """Verifies through the log-probabilities of prompt tokens: vLLM computes the whole prompt in every round."""

    kind = "vLLM"

    async def draft(self, ids: Sequence[int], depth: int, sampling: SamplingParams, timeout: float) -> tuple[int, ...]:
        body = {
            "prompt": list(ids),
            "max_tokens": depth,
            "temperature": 0,
            "return_token_ids": True,
            "ignore_eos": sampling.ignore_eos,
        }
        return _token_ids(self, await self.complete(body, timeout))

    def refusal(self, sampling: SamplingParams) -> str | None:
        return refuse_processed(sampling, self.kind)

    async def verify(self, round_: EndpointRound) -> Outcome:
        sampling, start = round_.sampling, len(round_.ids)
        top = 1 if sampling.is_greedy else sampling.top_k
        body = {
            "prompt": [*round_.ids, *round_.draft],
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logprobs": None if sampling.is_greedy else top,
            "prompt_logprobs": top if round_.draft else None,
        }
        choice = await self.complete(body)
        picks: list[int] = []
        for i, drafted in enumerate(round_.draft):
            picks.append(pick(_prompt_row(self, choice, start + i), sampling, start + i))
            if picks[-1] != drafted:
                return accept(round_, picks)
        if sampling.is_greedy:
            picks.append(_token_ids(self, choice)[0])
        else:
            row = _output_row(self, choice)
            picks.append(pick(row, sampling, start + len(round_.draft)))
        return accept(round_, picks)


def _token_ids(endpoint: Endpoint, choice: Mapping[str, Any]) -> tuple[int, ...]:
    ids = choice.get("token_ids")
    if not ids:
        raise EndpointFailed(f"{endpoint} returned no token ids: it needs `return_token_ids` (vLLM 0.10.2 or later)")
    return tuple(ids)


def _prompt_row(endpoint: Endpoint, choice: Mapping[str, Any], position: int) -> dict[int, float]:
    """{token: log-probability} of the likeliest tokens at a position of the prompt."""
    try:
        entries = choice["prompt_logprobs"][position]
        return {int(token): entry["logprob"] for token, entry in entries.items()}
    except (KeyError, IndexError, TypeError, AttributeError):
        raise EndpointFailed(f"{endpoint} returned no log-probabilities of the prompt") from None


def _output_row(endpoint: Endpoint, choice: Mapping[str, Any]) -> dict[int, float]:
    """{token: log-probability} of the likeliest tokens after the prompt."""
    try:
        entries = choice["logprobs"]["top_logprobs"][0]
        return {int(text.removeprefix(TOKEN_ID)): logprob for text, logprob in entries.items()}
    except (KeyError, IndexError, TypeError, ValueError):
        raise EndpointFailed(f"{endpoint} returned no log-probabilities by token id") from None
