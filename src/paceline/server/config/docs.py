"""Writes docs/configuration.md from the settings: `python -m paceline.server.config.docs > docs/configuration.md`."""

from collections.abc import Iterable

from paceline.server.config.config import SETTINGS, SamplingDefaults, ServerConfig
from paceline.server.config.learning import LearningConfig
from paceline.server.config.settings import ALIASES, Setting

INTRODUCTION = """\
# Configuration

Every setting has one name. `speculation.max_depth` in the file is `PACELINE_SPECULATION_MAX_DEPTH` in the environment and
`--speculation-max-depth` on the command line. The command line takes precedence over the environment, then the file, then the
defaults. The server rejects an unknown name and suggests the nearest one. It rejects a bad value and reports its source.

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

`PACELINE_CONFIG` may also set the path of the file. To set a value to none, write `none` in the environment and on the command
line, and `null` in the file.
"""

OTHER_SECTIONS = """\
## Limits by device

At start the engine chooses limits that are not set, and logs them with their reasons
(`engine/sizing/defaults.py`):

| limit | GPU | CPU |
|---|---|---|
| `max_num_seqs` | 256; fewer if logits or a cache of 512 tokens each do not fit | 64 |
| `max_batched_tokens` | 8192; fewer for large models, small GPUs or few sequences | 256 |
| `kv_tokens` | what `memory_fraction` leaves | an eighth of `memory_fraction`, at least 1 GiB |
| `speculation.max_depth` | 8; 31 for the trees of an EAGLE draft | 8 |

## Names of other servers

The file may also use these names:

| name | setting |
|---|---|
{rows}

`adaptive_draft: true` selects the rule `additive`, bounded by `min_draft_length` and `max_draft_length`; `false` selects
`fixed`. If a file has both, `max_draft_length` replaces `num_speculative_tokens`. The default rule `goodput` has no minimum
depth: a minimum could make it slower than plain decoding. `draft_acceptance_threshold` affects depth and circuit breaker, not
which tokens are accepted.

## Run-time flags

`enabled`, `method` and `max_depth` of speculation can change while the server runs: `PATCH /admin/flags` with a key of
scope `admin` ([access.md](access.md)).

| property | behaviour |
|---|---|
| start | next step, also for running requests |
| `effective` in the response | flags of the last step; in a cluster, as the workers last reported |
| `flags_file` | stores the flags and the last 100 changes, with author and time |
| `null` | returns a flag to the configuration |
| `max_depth` | may lower the configured value, not raise it |
| options of a request | apply within the flags |
"""


def configuration_page() -> str:
    server = [name for name in SETTINGS if name in ServerConfig.__dataclass_fields__]
    sampling = [f"sampling.{name}" for name in SamplingDefaults.__dataclass_fields__]
    learning = [f"learning.{name}" for name in LearningConfig.__dataclass_fields__]
    speculation = [name for name in SETTINGS if name.startswith("speculation.")]
    engine = [name for name in SETTINGS if name not in {*server, *sampling, *learning, *speculation}]
    parts = [
        INTRODUCTION,
        _table("Model and engine", engine),
        _table("Speculation", speculation),
        _table("Server", server),
        _table("Sampling defaults", sampling),
        _table("Learning", learning),
        OTHER_SECTIONS.format(rows="\n".join(f"| `{name}` | `{setting}` |" for name, setting in ALIASES.items())),
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
