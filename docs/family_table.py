"""Writes the table of families in docs/compatibility.md from the models that the tests run.

python docs/family_table.py            # write
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.exactness.test_families import FAMILIES as WITH_DRAFTS  # noqa: E402
from tests.fakes import tiny_model  # noqa: E402
from tests.models.gpu.test_decoder import FAMILIES as ON_GPU  # noqa: E402
from tests.models.tiny import FAMILIES, ROW_OF, spec  # noqa: E402

from paceline.models.decoder.gpu_ops import is_plain  # noqa: E402
from paceline.models.decoder.ops import native_calls  # noqa: E402
from paceline.models.families.registry import families  # noqa: E402
from paceline.models.families.spec import DecoderSpec  # noqa: E402
from paceline.models.runner.runner import ModelRunner  # noqa: E402
from paceline.models.shards.shards import split_obstacle  # noqa: E402
from paceline.tools.train.target import can_train  # noqa: E402

PAGE = ROOT / "docs" / "compatibility.md"
MARKS = re.compile(
    r"(<!-- families: begin \(docs/family_table\.py writes this\) -->\n\n).*?(\n\n<!-- families: end -->)", re.DOTALL
)
NAMES = {
    "deepseek_v2": "DeepSeek V2",
    "deepseek_v3": "DeepSeek V3, R1",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3, text part",
    "gemma4_text": "Gemma 4 31B, text part",
    "glm4": "GLM-4",
    "glm4_moe": "GLM-4.5, GLM-4.6",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "gpt_oss": "gpt-oss",
    "granite": "Granite 3",
    "granitemoehybrid": "Granite 4, sizes without Mamba layers and experts",
    "llama": "Llama 2 and 3, SmolLM2",
    "ministral3": "Ministral 3, text part",
    "mistral": "Mistral, text part of Mistral Small 3",
    "mixtral": "Mixtral",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "phi3": "Phi-3, Phi-4",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "smollm3": "SmolLM3",
}
GGUF_OF_OTHERS = {"mistral": "llama", "olmo3": "olmo2", "granitemoehybrid": "granite"}
"""Families whose GGUF files have the architecture of another one."""
HEAD = (
    "| family | `model_type` | configurations equal to transformers | GGUF | CPU | GPU operations | drafts | ranks | train |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def table() -> str:
    if families().keys() != NAMES.keys():
        raise SystemExit(f"docs/family_table.py has no name for: {', '.join(families().keys() ^ NAMES.keys())}")
    return "\n".join([HEAD, *(row(name) for name in sorted(NAMES, key=lambda name: NAMES[name].lower()))])


def row(name: str) -> str:
    rows = [row for row, config in FAMILIES.items() if config().model_type == name]
    config, gguf = spec(ROW_OF[name] or ""), families()[name].gguf or GGUF_OF_OTHERS.get(name)
    parts = (
        NAMES[name],
        f"`{name}`",
        len(rows),
        "no" if gguf is None else f"`{gguf}`",
        on_cpu(WITH_DRAFTS[name]),
        ("fused" if is_plain(config) else "general") if name in ON_GPU else "not tested",
        yes(name in WITH_DRAFTS),
        yes(split_obstacle(config) is None),
        yes(can_train(config)),
    )
    return f"| {' | '.join(map(str, parts))} |"


def yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def on_cpu(config: DecoderSpec) -> str:
    model = tiny_model(config=config)
    calls = native_calls(model, ModelRunner(model, 2).cache)
    return "pass" if calls.whole is not None else "layers" if calls.layers is not None else "kernels"


def page(text: str) -> str:
    """`text` with a current table between the marks."""
    if not MARKS.search(text):
        raise SystemExit(f"{PAGE} has no marks for the table of families")
    return MARKS.sub(lambda match: f"{match[1]}{table()}{match[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
