"""The profile of a worker: what its steps cost, what it holds, and what it is paid for.

A figure of a profile is a number or a curve (`ProfileValue`, `ProfileCurve`), with where it comes from. Profiles are JSON
files, and some ship with the package.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

from paceline.core.errors import InvalidConfig
from paceline.policy.cost.curve import Curve

Origin = Literal["measured", "assumed"]
ORIGINS: tuple[Origin, ...] = get_args(Origin)


def _check_points(origin: str, name: str) -> None:
    if origin not in ORIGINS:
        raise InvalidConfig(f"{name}: origin must be one of {', '.join(ORIGINS)}, got {origin!r}")


@dataclass(frozen=True, slots=True)
class ProfileValue:
    """A number of at least 0."""

    value: float
    origin: Origin
    source: str = ""
    """Command or document that gave the number."""

    def __post_init__(self) -> None:
        _check_points(self.origin, "figure")
        if not isfinite(self.value) or self.value < 0.0:
            raise InvalidConfig(f"a figure of a profile must be a finite number of at least 0, got {self.value}")


@dataclass(frozen=True)
class ProfileCurve:
    """Seconds by a count: rows of a pass, or sequences of a draft step."""

    points: tuple[tuple[int, float], ...]
    """(count, seconds), by increasing count."""
    origin: Origin
    source: str = ""

    def __post_init__(self) -> None:
        _check_points(self.origin, "curve")
        counts = [count for count, _ in self.points]
        if not counts or counts[0] < 1 or any(low >= high for low, high in pairwise(counts)):
            raise InvalidConfig(f"a curve needs points with increasing counts of at least 1, got {counts}")
        if not all(isfinite(seconds) and seconds > 0.0 for _, seconds in self.points):
            raise InvalidConfig("the seconds of a curve must be finite and above 0")

    def at(self, count: float) -> float:
        """Linear between points, constant before the first, and in proportion to the count after the last."""
        return self._curve(count)

    @cached_property
    def _curve(self) -> Curve:
        return Curve(self.points, "proportional")


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


FOLDER = Path(__file__).parent / "profiles"
SHIPPED = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))
"""Names of the profiles of the package."""
CURVES = ("pass_seconds", "prompt_seconds", "draft_seconds")
OPTIONAL = ("links", "about", "prompt_seconds", "is_padded")
TEXTS = ("name", "about")


def load_profile(name: str) -> WorkerProfile:
    """A shipped profile by its name, or the profile of a file."""
    path = FOLDER / f"{name}.json" if name in SHIPPED else Path(name)
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        shipped = ", ".join(SHIPPED)
        raise InvalidConfig(f"cannot read profile {name}: {error.strerror}. Give a file, or one of {shipped}") from None
    try:
        document = json.loads(text)
    except ValueError as error:
        raise InvalidConfig(f"profile {name} is not JSON: {error}") from None
    return from_document(document, name)


def save_profile(profile: WorkerProfile, path: Path) -> None:
    path.write_text(json.dumps(to_document(profile), indent=2) + "\n", "utf-8")


def to_document(profile: WorkerProfile) -> dict[str, Any]:
    return {"version": VERSION, **{key: value for key, value in asdict(profile).items() if value is not None}}


def from_document(document: Any, where: str) -> WorkerProfile:
    """The profile of a parsed file. Unknown and missing keys are errors."""
    if not isinstance(document, Mapping):
        raise InvalidConfig(f"profile {where}: expected an object at the top level")
    if document.get("version") != VERSION:
        raise InvalidConfig(
            f"profile {where}: version {document.get('version')!r} is not supported, this release reads {VERSION}: "
            "measure the worker again"
        )
    known = {field.name for field in fields(WorkerProfile)}
    required = known - set(OPTIONAL)
    given = set(document) - {"version"}
    if given - known or required - given:
        wrong = ", ".join(sorted(given - known)) or "none"
        missing = ", ".join(sorted(required - given)) or "none"
        raise InvalidConfig(f"profile {where}: unknown keys: {wrong}; missing keys: {missing}")
    try:
        return WorkerProfile(**{key: _value(key, document[key], where) for key in given})
    except InvalidConfig as error:
        raise InvalidConfig(f"profile {where}: {error}") from None


def _value(key: str, value: Any, where: str) -> Any:
    if key in TEXTS:
        if not isinstance(value, str):
            raise InvalidConfig(f"{key} must be text")
        return value
    if key == "is_padded":
        if not isinstance(value, bool):
            raise InvalidConfig("is_padded must be true or false")
        return value
    if key == "links":
        if not isinstance(value, Mapping):
            raise InvalidConfig("links must be an object")
        return {kind: _figure(f"links.{kind}", link) for kind, link in value.items()}
    return _curve(key, value) if key in CURVES else _figure(key, value)


def _figure(key: str, value: Any) -> ProfileValue:
    _check(key, value, "value")
    if not isinstance(value["value"], int | float) or isinstance(value["value"], bool):
        raise InvalidConfig(f"{key}.value must be a number")
    return ProfileValue(float(value["value"]), value["origin"], str(value.get("source", "")))


def _curve(key: str, value: Any) -> ProfileCurve:
    _check(key, value, "points")
    try:
        points = tuple((int(count), float(seconds)) for count, seconds in value["points"])
    except (TypeError, ValueError):
        raise InvalidConfig(f"{key}.points must be pairs of a count and seconds") from None
    return ProfileCurve(points, value["origin"], str(value.get("source", "")))


def _check(key: str, value: Any, content: str) -> None:
    if not isinstance(value, Mapping) or not {content, "origin"} <= set(value) <= {content, "origin", "source"}:
        raise InvalidConfig(f"{key} must be an object with `{content}`, `origin` and `source`")
