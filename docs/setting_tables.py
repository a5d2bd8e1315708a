"""Writes the tables of docs/configuration.md from the settings.

python docs/setting_tables.py            # write
"""

import re
from collections.abc import Iterable
from pathlib import Path

from paceline.gateway.config.config import SETTINGS, LearningConfig, SamplingDefaults, ServerConfig
from paceline.gateway.config.settings import ALIASES, Setting

PAGE = Path(__file__).parent / "configuration.md"
MARKS = re.compile(
    r"(<!-- settings: (\w+) \(docs/setting_tables\.py writes this\) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL
)


def tables() -> dict[str, str]:
    """The tables by the name in their mark."""
    server = [name for name in SETTINGS if name in ServerConfig.__dataclass_fields__]
    sampling = [f"sampling.{name}" for name in SamplingDefaults.__dataclass_fields__]
    learning = [f"learning.{name}" for name in LearningConfig.__dataclass_fields__]
    speculation = [name for name in SETTINGS if name.startswith("speculation.")]
    engine = [name for name in SETTINGS if name not in {*server, *sampling, *learning, *speculation}]
    aliases = [f"| `{name}` | `{setting}` |" for name, setting in ALIASES.items()]
    return {
        "engine": _table(engine),
        "speculation": _table(speculation),
        "server": _table(server),
        "sampling": _table(sampling),
        "learning": _table(learning),
        "aliases": "\n".join(["| name | setting |", "|---|---|", *aliases]),
    }


def page(text: str) -> str:
    """`text` with current tables between their marks."""
    known = tables()
    names = [match[2] for match in MARKS.finditer(text)]
    if sorted(names) != sorted(known):
        raise SystemExit(f"{PAGE} has marks for {sorted(names)}, and the tables are {sorted(known)}")
    return MARKS.sub(lambda match: f"{match[1]}{known[match[2]]}{match[3]}", text)


def _table(names: Iterable[str]) -> str:
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *(_row(SETTINGS[name]) for name in names)])


def _row(setting: Setting) -> str:
    default = setting.default if isinstance(setting.default, float | str) else str(setting.default).lower()
    choices = f" One of {', '.join(f'`{choice}`' for choice in setting.choices)}." if setting.choices else ""
    help_text = setting.help if setting.help.endswith((".", "…")) or not setting.help else f"{setting.help}."
    return f"| `{setting.name}` | `{default}` | {help_text}{choices} |"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
