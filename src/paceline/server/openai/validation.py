"""What is wrong with a request body, in one sentence that names the parameter."""

import difflib
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from paceline.server.openai.errors import BadRequest

CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "unsupported_parameter": "unsupported_parameter",
    "unsupported_content": "unsupported_value",
    "json_invalid": "invalid_json",
}


def bad_request(errors: Sequence[dict[str, Any]], body: Any, schema: Any) -> BadRequest:
    """`errors` as pydantic lists them, `schema` the type of the body."""
    paths = [_path(error, body) for error in errors]
    # A union reports on every member: the one that got furthest is the one that was meant.
    deepest = max(len(path) for path in paths)
    meant = [(error, path) for error, path in zip(errors, paths, strict=True) if len(path) == deepest]
    error, path = meant[0]
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
        nearest = difflib.get_close_matches(name, _names(schema, path[:-1]), n=1)
        message = f"{param} is not a parameter here"
        message += f"; did you mean {'.'.join([*above, *nearest])}?" if nearest else ""
    elif kind not in ("inconsistent", "unsupported_parameter"):
        reasons = dict.fromkeys(str(other["msg"]) for other, where in meant if where == path)
        message = f"{param or 'the body'}: {', or '.join(reasons)}"
    return BadRequest(message, param=param, code=CODES.get(kind, "invalid_value"))


def _names(schema: Any, path: Sequence[str | int]) -> set[str]:
    """What an object at `path` in a body of this type may have; of a union, what any of its members may."""
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        fields = schema.model_fields
        if not path:
            return set(fields)
        return _names(fields[path[0]].annotation, path[1:]) if path[0] in fields else set()
    path = path[1:] if get_origin(schema) is list else path
    return set().union(*(_names(member, path) for member in get_args(schema)))


def _path(error: dict[str, Any], body: Any) -> tuple[str | int, ...]:
    """The error's place in the body. Pydantic's own has the members of unions in it, which are no part of the body."""
    path: list[str | int] = []
    here, parts = body, error["loc"][1:]
    for place, part in enumerate(parts, 1):
        inside = isinstance(here, dict) and part in here
        inside = inside or (isinstance(here, list) and isinstance(part, int) and part < len(here))
        if inside:
            here = here[part]
        if inside or (error["type"] == "missing" and place == len(parts)):
            path.append(part)
    return tuple(path)
