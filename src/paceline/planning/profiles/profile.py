"""The profile of a worker: what its steps cost, what it holds, and what it is paid for."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from paceline.core.errors import InvalidConfig
from paceline.planning.profiles.curve import ProfileCurve, ProfileValue

VERSION = 1
"""Version of the file format."""


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """One kind of device with one target model and, optionally, one draft model. Times are seconds.

    A pass over R rows of B sequences with C tokens of context in all takes

        pass_seconds(R) + context_seconds * C + prompt_context_seconds * sum over prompt rows of the tokens before each

    A plain step has B rows, a verify step B (K + 1). A mixed step has those, D, and P rows of prompts, which need no logits:

        pass_seconds(D) + prompt_seconds(D + P) - prompt_seconds(D)
    """

    name: str
    pass_seconds: ProfileCurve
    """Time of a pass by rows, without attention to contexts."""
    context_seconds: ProfileValue
    """Time per token of context of the sequences that decode."""
    prompt_context_seconds: ProfileValue
    """Time per prompt row and token before it."""
    draft_seconds: ProfileCurve
    """Time of one draft step by sequences."""
    draft_prefill_seconds: ProfileValue
    """Time per prompt token that the draft model computes."""
    kv_bytes_per_token: ProfileValue
    kv_tokens: ProfileValue
    """Capacity of the KV cache."""
    max_num_seqs: ProfileValue
    """Sequences that decode together."""
    start_seconds: ProfileValue
    """Time from the start of the process to its first step."""
    price_per_hour: ProfileValue
    """Dollars."""
    draft_price_per_hour: ProfileValue
    """Dollars of the device of a draft worker."""
    round_trip_seconds: ProfileValue
    """Time of a message to a draft worker and back."""
    links: Mapping[str, ProfileValue] = field(default_factory=dict)
    """Bytes per second by kind of link."""
    prompt_seconds: ProfileCurve | None = None
    """Time of a pass by rows of prompts, of which few have logits. If None, it is that of `pass_seconds`."""
    is_padded: bool = False
    """Whether steps are padded, as those of CUDA graphs are: a number of slots, and as many rows for each as for the deepest
    draft."""
    about: str = ""

    def __post_init__(self) -> None:
        for name in ("kv_bytes_per_token", "kv_tokens", "max_num_seqs"):
            if getattr(self, name).value < 1:
                raise InvalidConfig(f"profile {self.name}: {name} must be at least 1")

    def rows_seconds(self, decoding: int, prompts: int) -> float:
        """Time of a pass by its rows, without attention to contexts."""
        if not prompts or self.prompt_seconds is None:
            return self.pass_seconds.at(decoding + prompts)
        if not decoding:
            return self.prompt_seconds.at(prompts)
        more = self.prompt_seconds.at(decoding + prompts) - self.prompt_seconds.at(decoding)
        return self.pass_seconds.at(decoding) + max(0.0, more)

    def prefill_seconds(self, length: int, cached: int = 0, rows: int = 2048) -> float:
        """Time of a prompt alone on the worker, in passes of up to `rows` rows."""
        passes, rest = divmod(max(1, length - cached), rows)
        linear = passes * self.rows_seconds(0, rows) + (self.rows_seconds(0, rest) if rest else 0.0)
        return linear + self.prompt_context_seconds.value * (length * length - cached * cached) / 2.0

    def verify_seconds(self, batch: int, depth: int, context: float) -> float:
        """Time of the target's pass of one round. A round of `depth` 0 is a plain step. `context` is the number of tokens of
        all sequences."""
        return self.pass_seconds.at(batch * (depth + 1)) + self.context_seconds.value * context

    def drafting_seconds(self, batch: float, depth: int) -> float:
        """Time of `depth` draft steps for `batch` sequences."""
        return depth * self.draft_seconds.at(batch)

    def assumed(self) -> list[str]:
        """Names of the fields that were not measured."""
        named = [(profile_field.name, getattr(self, profile_field.name)) for profile_field in fields(self)]
        named += [(f"links.{kind}", figure) for kind, figure in self.links.items()]
        return [
            name
            for name, value in named
            if isinstance(value, ProfileValue | ProfileCurve) and value.origin == "assumed"
        ]
