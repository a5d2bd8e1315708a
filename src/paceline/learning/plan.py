"""The options of `paceline learn`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from paceline.core.errors import InvalidConfig
from paceline.models.loading.hub import EMBEDDED
from paceline.train.plan import option

LEAST = {
    "new_tokens": 1,
    "recent_tokens": 1,
    "length": 16,
    "rows": 1,
    "min_held_out": 2,
    "threads": 1,
    "trial_seconds": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnPlan:
    """One field per option of `paceline learn`; the annotation is its help text."""

    server: Annotated[str, "URL of the server, such as http://127.0.0.1:8000."]
    draft: Annotated[str, "Trained draft that the server uses now: a name or a folder."]
    out: Annotated[Path, "Folder of the learned versions. Workers must be able to read it under the same path."]
    model: Annotated[str, "The target, whose hidden states are computed here: a folder, a .gguf file, a name."] = (
        EMBEDDED
    )
    served_model: Annotated[str | None, "Name of the model in the API, if the server has several."] = None
    key: Annotated[str | None, "API key with the scope admin. Default: PACELINE_ADMIN_KEY of the environment."] = None
    minutes: Annotated[float | None, "End after this time. Default: run until Ctrl-C or SIGTERM."] = None
    cluster: Annotated[Path | None, "cluster.yaml of the server, to swap the draft of a pool."] = None
    pool: Annotated[str | None, "Draft pool of --cluster. Default: the draft inside the engines of the server."] = None
    device: Annotated[str, "cpu, cuda, or auto."] = "cpu"
    threads: Annotated[int, "Threads on a CPU."] = 1
    share: Annotated[float, "Share of the time in which training computes; over 0 and at most 1."] = 0.5
    new_tokens: Annotated[int, "New tokens of samples that start a training; twice as many after each refusal."] = (
        16_384
    )
    recent_tokens: Annotated[int, "Tokens of the newest samples that a training uses."] = 65_536
    replay: Annotated[float, "Share of a training that uses older samples, against forgetting."] = 0.25
    held_out: Annotated[float, "Share of the samples that are held out for the offline gate."] = 0.125
    min_held_out: Annotated[int, "Held-out samples that the offline gate needs."] = 16
    tenant_share: Annotated[float, "Largest share of one tenant in a training, if there are several."] = 0.5
    length: Annotated[int, "Tokens of a row; longer samples are cut into several rows."] = 512
    rows: Annotated[int, "Rows of a training step."] = 8
    epochs: Annotated[float, "Passes over the samples of a training."] = 2.0
    learning_rate: Annotated[float, "Learning rate after the warm-up."] = 5e-4
    margin: Annotated[float, "Gain in tokens per round on held-out samples that the offline gate needs."] = 0.01
    trial_seconds: Annotated[float, "Longest time of a trial under load."] = 600.0
    interval: Annotated[float, "Seconds between two reads of samples."] = 5.0
    seed: Annotated[int, "Seed of the order of rows and of the replayed samples."] = 0

    def check(self) -> None:
        """Raise `InvalidConfig` for invalid options, before a model is loaded."""
        for entry in fields(self):
            value, least = getattr(self, entry.name), LEAST.get(entry.name)
            if least is not None and not value >= least:
                raise InvalidConfig(f"{option(entry.name)} must be at least {least:g}, got {value:g}")
        for name in ("share", "tenant_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise InvalidConfig(f"{option(name)} must be over 0 and at most 1, got {getattr(self, name):g}")
        for name in ("replay", "held_out"):
            if not 0.0 <= getattr(self, name) <= 0.9:
                raise InvalidConfig(f"{option(name)} must be between 0 and 0.9, got {getattr(self, name):g}")
        for name in ("epochs", "learning_rate", "interval"):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"{option(name)} must be above 0, got {getattr(self, name):g}")
        if not self.server.startswith(("http://", "https://")):
            raise InvalidConfig(f"the server must be a URL such as http://127.0.0.1:8000, got {self.server!r}")
        if (self.cluster is None) != (self.pool is None):
            raise InvalidConfig("--cluster and --pool belong together: give both, or none of them")
