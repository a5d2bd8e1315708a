"""The error of a request body that is not JSON or does not fit its schema, as one sentence."""

import difflib
import json
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from paceline.gateway.api.chat_bodies import ChatBody
from paceline.gateway.api.errors import BadRequest
from paceline.gateway.api.translated import TranslatedBody

CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "near_parameter": "unknown_parameter",
    "unsupported_parameter": "unsupported_parameter",
    "unsupported_content": "unsupported_value",
    "json_invalid": "invalid_json",
}


def body_error(errors: Sequence[dict[str, Any]], body: Any, schema: Any) -> BadRequest:
    """One sentence that names the wrong parameter. `errors` come from pydantic; `schema` is the type of the body."""
    paths = [_path(error, body) for error in errors]
    # Pydantic reports every member of a union: keep the errors of the member that matched deepest.
    deepest = max(len(path) for path in paths)
    matched = [(error, path) for error, path in zip(errors, paths, strict=True) if len(path) == deepest]
    error, path = matched[0]
    kind = error["type"]
    param = error.get("ctx", {}).get("param") or ".".join(str(part) for part in path) or None
    if kind == "unsupported_parameter":
        param = ".".join([*(str(part) for part in path), error["ctx"]["name"]])
    message = str(error["msg"])
    if kind == "json_invalid":
        message, param = f"the body is not JSON: {error.get('ctx', {}).get('error', message)}", None
    elif kind == "missing":
        message = f"{param or 'the body'} is required" if path else "the request needs a JSON body"
    elif kind == "extra_forbidden":
        *above, name = (str(part) for part in path)
        nearest = difflib.get_close_matches(name, _field_names(schema, path[:-1]), n=1)
        message = f"unknown parameter {param}"
        message += f"; did you mean {'.'.join([*above, *nearest])}?" if nearest else ""
    elif kind == "union_tag_invalid":
        context = error["ctx"]
        param = ".".join([*(str(part) for part in path), context["discriminator"].strip("'")])
        message = f"{param}: must be one of {context['expected_tags']}, got {context['tag']!r}"
    elif kind not in ("inconsistent", "near_parameter", "unsupported_parameter"):
        reasons = dict.fromkeys(str(other["msg"]) for other, position in matched if position == path)
        message = f"{param or 'the body'}: {', or '.join(reasons)}"
    return BadRequest(message, param=param, code=CODES.get(kind, "invalid_value"))


def validation_error(invalid: ValidationError, body: Any, schema: Any) -> BadRequest:
    """The error of a body that was validated without FastAPI, in the same words."""
    errors = [{**error, "loc": ("body", *error["loc"])} for error in invalid.errors(include_url=False)]
    return body_error(errors, body, schema)


def translated(body: TranslatedBody) -> ChatBody:
    """The chat request with the same meaning. Raises `BadRequest`."""
    try:
        return body.chat_body()
    except ValidationError as invalid:
        raise validation_error(invalid, {}, ChatBody) from None


def not_json(error: json.JSONDecodeError) -> BadRequest:
    return body_error(
        [{"type": "json_invalid", "loc": ("body", error.pos), "msg": "", "ctx": {"error": error.msg}}], {}, None
    )


def _field_names(schema: Any, path: Sequence[str | int]) -> set[str]:
    """Fields that an object at `path` in a body of this type may have, over all members of unions."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        fields = schema.model_fields
        if not path:
            return set(fields)
        return _field_names(fields[path[0]].annotation, path[1:]) if path[0] in fields else set()
    path = path[1:] if get_origin(schema) is list else path
    return set().union(*(_field_names(member, path) for member in get_args(schema)))


def _path(error: dict[str, Any], body: Any) -> tuple[str | int, ...]:
    """The error's position in the body: pydantic's position without the names of union members."""
    path: list[str | int] = []
    value, parts = body, error["loc"][1:]
    for depth, part in enumerate(parts, 1):
        is_inside = isinstance(value, dict) and part in value
        is_inside = is_inside or (isinstance(value, list) and isinstance(part, int) and part < len(value))
        if is_inside:
            value = value[part]
        if is_inside or (error["type"] == "missing" and depth == len(parts)):
            path.append(part)
    return tuple(path)
