"""The one table of settings: a field of the configuration is a key of the file, a variable and an option of that name.

`speculation.max_depth` in the file is `PACELINE_SPECULATION_MAX_DEPTH` in the environment and `--speculation-max-depth`
on the command line.
"""

import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from paceline.core.errors import InvalidConfig

PREFIX = "PACELINE_"
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
NOTHING = ("none", "null")


@dataclass(frozen=True, slots=True)
class Setting:
    """`name` is the key in the file, its sections joined by dots."""

    name: str
    hint: Any
    default: Any
    help: str

    @property
    def variable(self) -> str:
        return PREFIX + self.name.replace(".", "_").upper()

    @property
    def option(self) -> str:
        return "--" + self.name.replace(".", "-").replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.hint) if get_origin(self.hint) is Literal else ()

    @property
    def kind(self) -> type:
        """`bool`, `int`, `float` or `str`; whether it may be none is `is_optional`."""
        if self.choices:
            return str
        kinds = [kind for kind in get_args(self.hint) or (self.hint,) if kind is not NoneType]
        return kinds[0]

    @property
    def is_optional(self) -> bool:
        return NoneType in get_args(self.hint)

    def parse(self, text: str) -> Any:
        """The value that `text`, of a variable or an option, stands for."""
        word = text.strip().lower()
        if self.is_optional and word in NOTHING:
            return None
        if self.kind is bool:
            if word in TRUE or word in FALSE:
                return word in TRUE
            raise InvalidConfig(f"{self.name} must be true or false, got {text!r}")
        try:
            return self.kind(text)
        except ValueError:
            raise InvalidConfig(f"{self.name} must be {_noun(self)}, got {text!r}") from None


def settings_of(kind: type, flat: str = "", section: str = "") -> Iterator[Setting]:
    """Every field of the dataclass `kind`, those of the field named `flat` beside its own, others in their section."""
    hints, helps = get_type_hints(kind), field_docs(kind)
    for field in fields(kind):
        hint = hints[field.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from settings_of(hint, flat, section if field.name == flat else f"{section}{field.name}.")
        else:
            yield Setting(section + field.name, hint, _default(field), helps.get(field.name, ""))


def field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass, in one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[field.target.id] = " ".join(str(after.value.value).split())
    return docs


def nearest(name: str, known: Iterable[str]) -> str:
    """What to say after `unknown key …`."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else "see docs/configuration.md for all there are"


def _default(field: "Field[Any]") -> Any:
    return field.default if field.default is not MISSING else None


def _noun(setting: Setting) -> str:
    return {int: "a whole number", float: "a number"}[setting.kind] + (" or none" if setting.is_optional else "")
