"""docs/configuration.md, from the table of settings: `python -m paceline.server.config.config_docs > docs/configuration.md`."""

from collections.abc import Iterable

from paceline.server.config.config import SETTINGS, SamplingDefaults, ServerConfig
from paceline.server.config.config_file import ALIASES
from paceline.server.config.settings import Setting

INTRODUCTION = """\
# Configuration

A setting has one name. `speculation.max_depth` in the file is `PACELINE_SPECULATION_MAX_DEPTH` in the environment and
`--speculation-max-depth` on the command line. The command line wins over the environment, that over the file, and the file
over the defaults. A name that is not known is refused, and the message says which one was probably meant; a bad value
is refused with where it came from.

    paceline serve --config paceline.yaml

```yaml
model: /models/llama-3-8b
draft: /models/llama-3-1b
max_num_seqs: 32
speculation:
  max_depth: 6
sampling:
  temperature: 0.7
```

`PACELINE_CONFIG` may name the file. Settings that may be `none` are set to nothing with the word `none` in the environment
and on the command line, and with `null` in the file.
"""

ELSEWHERE = """\
## Files written for other servers

These names are understood in the file too:

| there | here |
|---|---|
{rows}

`adaptive_draft: true` is the rule `additive`, whose bounds `min_draft_length` and `max_draft_length` are; `false` is the
rule `fixed`. Where a file has both, `max_draft_length` is meant and not `num_speculative_tokens`. The rule `goodput`, the
default here, has no minimum: a floor would break its promise of no loss. `draft_acceptance_threshold` steers depth and
breaker and never decides whether a token is accepted.

## Run-time flags

`enabled`, `method` and `max_depth` of speculation can be changed while the server runs: `PATCH /admin/flags` with a
key of the scope `admin` ([access.md](access.md)). They hold from the next step on, for running requests too;
`effective` in the answer is how the last step was made, of a cluster what its workers last reported. `flags_file`
remembers them over a restart, with the last 100 changes, who made them and when. `null` gives a choice back to the
configuration. A flag may lower `max_depth`, never raise it, and what a request asks for applies within the flags.
"""


def configuration_page() -> str:
    server = [name for name in SETTINGS if name in ServerConfig.__dataclass_fields__]
    sampling = [f"sampling.{name}" for name in SamplingDefaults.__dataclass_fields__]
    speculation = [name for name in SETTINGS if name.startswith("speculation.")]
    engine = [name for name in SETTINGS if name not in {*server, *sampling, *speculation}]
    parts = [
        INTRODUCTION,
        _table("Model and engine", engine),
        _table("Speculation", speculation),
        _table("Server", server),
        _table("Sampling, for requests that do not say", sampling),
        ELSEWHERE.format(rows="\n".join(f"| `{there}` | `{here}` |" for there, here in ALIASES.items())),
    ]
    return "\n".join(parts)


def _table(title: str, names: Iterable[str]) -> str:
    rows = "\n".join(_row(SETTINGS[name]) for name in names)
    return f"## {title}\n\n| setting | default | meaning |\n|---|---|---|\n{rows}\n"


def _row(setting: Setting) -> str:
    default = setting.default if isinstance(setting.default, float | str) else str(setting.default).lower()
    choices = f" One of {', '.join(f'`{choice}`' for choice in setting.choices)}." if setting.choices else ""
    help_text = setting.help if setting.help.endswith((".", "…")) or not setting.help else f"{setting.help}."
    return f"| `{setting.name}` | `{default}` | {help_text}{choices} |"


if __name__ == "__main__":
    print(configuration_page(), end="")
