"""What a training is asked to do: one table of options for every way to start one."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from paceline.core.errors import InvalidConfig
from paceline.models.loading.hub import EMBEDDED

Kind = Literal["eagle", "medusa", "distilled"]

LEAST = {
    "steps": 1,
    "text_tokens": 1,
    "length": 16,
    "writer_rows": 1,
    "rows": 1,
    "draft_vocab": 1,
    "layers": 1,
    "ffn_size": 1,
    "medusa_heads": 1,
    "lora_rank": 1,
    "seed": 0,
}
ABOVE_ZERO = ("minutes", "text_minutes", "learning_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    kind: Annotated[Kind, "What to train: eagle, medusa or distilled."]
    out: Annotated[Path, "Folder for the draft. One that holds an interrupted training goes on with it."]
    model: Annotated[str, "The target: a folder, a .gguf file, a Hugging Face id."] = EMBEDDED
    text: Annotated[
        Path | None,
        "File of text the target wrote; written if it is not there, shared by all drafts of a target. "
        "None: text.pt in the folder.",
    ] = None
    prompts: Annotated[
        tuple[Path, ...], "Lines of JSON with the traffic's own prompts. May be given more than once."
    ] = ()
    prompt_share: Annotated[float, "How much of the text answers those prompts; the rest is of built-in kinds."] = 0.25
    evaluate: Annotated[Path | None, "Prompts to judge the draft by at the end, never trained on."] = None
    minutes: Annotated[float | None, "Train for so long."] = None
    steps: Annotated[int | None, "Train for so many steps."] = None
    text_tokens: Annotated[int, "Tokens the target writes at the most, if the file does not hold them yet."] = 4_000_000
    text_minutes: Annotated[float | None, "And for how long it writes at the most. None: no longer than --minutes."] = (
        None
    )
    length: Annotated[int, "Tokens of a row of text."] = 640
    writer_rows: Annotated[int, "Rows written side by side."] = 64
    rows: Annotated[int, "Rows of text in a training step."] = 16
    draft_vocab: Annotated[int | None, "Guess only the so many most frequent tokens. None: all."] = None
    layers: Annotated[int, "Layers of a distilled draft."] = 2
    ffn_size: Annotated[int | None, "Feed-forward size of the draft. None: the target's, half of it if distilled."] = (
        None
    )
    medusa_heads: Annotated[int, "Heads of a Medusa draft."] = 4
    learning_rate: Annotated[float, "Of the first step after the warm-up."] = 1e-3
    lora: Annotated[Path | None, "Adapt this trained draft with low-rank additions instead of starting fresh."] = None
    lora_rank: Annotated[int, "Rank of those additions."] = 16
    start: Annotated[Path | None, "Train this draft on, all of its weights, instead of starting fresh."] = None
    seed: Annotated[int, "Of the text, the draft and the order of rows."] = 0
    device: Annotated[str, "cpu, cuda, or auto."] = "auto"
    compile: Annotated[bool, "Compile the target and the loss; pays after a minute or so on a GPU."] = False

    @property
    def text_file(self) -> Path:
        return self.text or self.out / "text.pt"

    @property
    def seconds_of_text(self) -> float | None:
        minutes = self.minutes if self.text_minutes is None else self.text_minutes
        return None if minutes is None else 60.0 * minutes

    def check(self) -> None:
        """Raise what can be said before a model is loaded."""
        if self.minutes is None and self.steps is None:
            raise InvalidConfig("say how long to train: --minutes or --steps")
        for entry in fields(self):
            value, least = getattr(self, entry.name), LEAST.get(entry.name)
            if least is not None and value is not None and not value >= least:
                raise InvalidConfig(f"{_option(entry.name)} must be at least {least:g}, got {value:g}")
            if entry.name in ABOVE_ZERO and value is not None and not value > 0:
                raise InvalidConfig(f"{_option(entry.name)} must be above 0, got {value:g}")
        if not 0.0 <= self.prompt_share <= 1.0:
            raise InvalidConfig(f"--prompt-share is a share, 0 to 1, got {self.prompt_share:g}")
        if self.lora is not None and self.start is not None:
            raise InvalidConfig("--lora adapts a draft, --start trains all of it on: give one of them")
        files = {"prompts": self.prompts, "evaluate": (self.evaluate,), "lora": (self.lora,), "start": (self.start,)}
        for name, paths in files.items():
            for path in paths:
                if path is not None and not path.exists():
                    raise InvalidConfig(f"{_option(name)}: there is no {path}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
