"""Profiles as JSON files, and the profiles that ship with the package."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from paceline.core.errors import InvalidConfig
from paceline.planning.profiles.curve import ProfileCurve, ProfileValue
from paceline.planning.profiles.profile import VERSION, WorkerProfile

FOLDER = Path(__file__).parent
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
