"""Settings: every field of the configuration is a file key, an environment variable and a command line option.

`speculation.max_depth` in the file is `PACELINE_SPECULATION_MAX_DEPTH` in the environment and `--speculation-max-depth`
on the command line. `read_file` reads the YAML file.
"""

import ast
import difflib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from paceline.core.errors import InvalidConfig, MissingDependency, UnknownKeys

PREFIX = "PACELINE_"
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
NONE = ("none", "null")
ALIASES = {
    "speculative_model": "draft",
    "num_speculative_tokens": "speculation.max_depth",
    "draft_acceptance_threshold": "speculation.acceptance_threshold",
    "enable_prefix_caching": "prefix_caching",
    "gpu_memory_utilization": "memory_fraction",
    "orchestration.adaptive_draft": "speculation.depth",
    "orchestration.min_draft_length": "speculation.min_depth",
    "orchestration.max_draft_length": "speculation.max_depth",
    "orchestration.fallback_after_low_acceptance": "speculation.breaker_rounds",
}
"""Names of other servers' configuration files, and the settings they mean."""
OVERRIDES = {"orchestration.max_draft_length": "num_speculative_tokens"}
"""Aliases that replace another alias if a file has the two of them."""
SWITCHES = {"learning": "learning.enabled"}
"""Sections that a file may also give as true or false."""
ADAPTIVE = {True: "additive", False: "fixed"}
"""Depth rules for the values of `adaptive_draft`."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `name` is the key in the file, with sections joined by dots."""

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
        """`bool`, `int`, `float` or `str`, without None."""
        if self.choices:
            return str
        kinds = [kind for kind in get_args(self.hint) or (self.hint,) if kind is not NoneType]
        return kinds[0]

    @property
    def is_optional(self) -> bool:
        return NoneType in get_args(self.hint)

    def parse(self, text: str) -> Any:
        """The value of `text` from a variable or an option. Raises `InvalidConfig`."""
        word = text.strip().lower()
        if self.is_optional and word in NONE:
            return None
        if self.kind is bool:
            if word in TRUE or word in FALSE:
                return word in TRUE
            raise InvalidConfig(f"{self.name} must be true or false, got {text!r}")
        try:
            return self.kind(text)
        except ValueError:
            raise InvalidConfig(f"{self.name} must be {_type_name(self)}, got {text!r}") from None


def read_settings(kind: type, flat: str = "", section: str = "") -> Iterator[Setting]:
    """The settings of a dataclass. A nested dataclass is a section, except the field `flat`, whose settings have no section."""
    hints, helps = get_type_hints(kind), field_docs(kind)
    for field in fields(kind):
        hint = hints[field.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from read_settings(hint, flat, section if field.name == flat else f"{section}{field.name}.")
        else:
            yield Setting(section + field.name, hint, _default(field), helps.get(field.name, ""))


def field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass, as one line."""
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


def suggest(name: str, known: Iterable[str]) -> str:
    """A hint for the message about an unknown name."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else "see docs/configuration.md for all settings"


def _default(field: "Field[Any]") -> Any:
    return field.default if field.default is not MISSING else None


def _type_name(setting: Setting) -> str:
    return {int: "a whole number", float: "a number"}[setting.kind] + (" or none" if setting.is_optional else "")


def read_file(path: Path, settings: Mapping[str, Setting], section: str | None = None) -> dict[str, tuple[Any, str]]:
    """{setting: (value, its source for messages)}. With `section` it reads only that section of the file. Raises
    `UnknownKeys`."""
    values: dict[str, tuple[Any, str]] = {}
    document = read_yaml(path)
    given = dict(_flatten(document if section is None else document.get(section) or {}, path))
    where = "" if section is None else f"{section}."
    known = [where + name for name in (*settings, *ALIASES)]
    unknown = []
    for key, value in given.items():
        name = SWITCHES.get(key) or ALIASES.get(key, key)
        if value is None and any(setting.startswith(f"{key}.") for setting in settings):
            continue  # an empty section
        if name not in settings and (inside := [setting for setting in settings if setting.startswith(f"{key}.")]):
            raise InvalidConfig(f"{key!r} in {path} is a section: write settings below it, such as {inside[0]}")
        if name not in settings:
            unknown.append(f"{path}: unknown key {where + key!r}; {suggest(where + key, known)}")
            continue
        if key in OVERRIDES.values() and any(other in given for other, weaker in OVERRIDES.items() if weaker == key):
            continue
        if name in values:
            raise InvalidConfig(f"{values[name][1]} and {key!r} in {path} are the same setting: remove one")
        if key == "orchestration.adaptive_draft":
            if not isinstance(value, bool):
                raise InvalidConfig(f"{key} must be true or false, got {value!r} (in {path})")
            value = ADAPTIVE[value]
        values[name] = value, f"{key!r} in {path}"
    if unknown:
        raise UnknownKeys(unknown)
    return values


MAX_YAML_CHARS = 1 << 20
MAX_YAML_LEVELS = 64
MAX_YAML_VALUES = 100_000
"""Values of a configuration file, those of an alias each time that it occurs."""


def read_yaml(path: Path) -> Any:
    """The document in a YAML file; an empty mapping for an empty file. Raises `InvalidConfig`, also for aliases that stand for
    so many values that whatever reads them all would take all memory."""
    try:
        import yaml
    except ImportError:
        raise MissingDependency("pyyaml", "a configuration file", "server") from None
    try:
        text = path.read_text("utf-8")
        if len(text) > MAX_YAML_CHARS:
            raise InvalidConfig(f"{path} has {len(text)} characters: a configuration has at most {MAX_YAML_CHARS}")
        if re.search(rf"([\[{{]\s*){{{MAX_YAML_LEVELS}}}", text):  # its time grows with the square of the levels
            raise InvalidConfig(f"{path} is nested too deeply")
        _reject_repeated_keys(yaml.compose(text, yaml.SafeLoader), path, set())
        document = yaml.safe_load(text) or {}
        if _num_values(document, {}) > MAX_YAML_VALUES:
            raise InvalidConfig(f"{path} has more than {MAX_YAML_VALUES} values: use fewer aliases")
        return document
    except RecursionError:
        raise InvalidConfig(f"{path} is nested too deeply, or an alias contains itself") from None
    except OSError as error:
        raise InvalidConfig(f"cannot read the configuration file {path}: {error.strerror}") from None
    except InvalidConfig:
        raise
    except Exception as error:  # the library lets what is wrong in a value of a tag pass as it is
        raise InvalidConfig(f"{path} is not YAML: {error}") from None


def _reject_repeated_keys(node: Any, path: Path, known: set[int]) -> None:
    """Raises `InvalidConfig` if a mapping of a document has a key twice: the reader would drop the first value. `known` has
    the ids of the nodes that were checked."""
    if id(node) in known or not hasattr(node, "value") or isinstance(node.value, str):
        return
    known.add(id(node))
    seen: set[str] = set()
    for item in node.value:
        key, *values = item if isinstance(item, tuple) else (None, item)
        if isinstance(getattr(key, "value", None), str):
            if key.value in seen:
                line = key.start_mark.line + 1
                raise InvalidConfig(f"{path}, line {line}: the key {key.value!r} occurs twice; remove one of them")
            seen.add(key.value)
        for value in values:
            _reject_repeated_keys(value, path, known)


def _num_values(value: Any, known: dict[int, int]) -> int:
    """Values in this one. `known` has the counts of lists and mappings by their ids: an alias is the same object."""
    if not isinstance(value, list | dict):
        return 1
    if id(value) not in known:
        inner = value if isinstance(value, list) else value.values()
        known[id(value)] = 1 + sum(_num_values(item, known) for item in inner)
    return known[id(value)]


def _flatten(document: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """Keys and values, with the section as a prefix of the key. Sections do not nest."""
    if not isinstance(document, Mapping):
        raise InvalidConfig(f"{path} must be a mapping of settings, got {document!r}")
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", inner_value) for inner, inner_value in value.items())
        else:
            yield str(key), value
