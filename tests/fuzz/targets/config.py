"""Configuration files of servers and clusters."""

import tempfile
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.deploy.load import load_gateway_config
from paceline.gateway.config.config import SETTINGS, GatewayConfig
from tests.fuzz.mutations import text_mutator
from tests.fuzz.target import FuzzTarget

FRAGMENTS = (
    *(f"{name}: " for name in SETTINGS if "." not in name),
    *(
        "\n",
        "  ",
        "- ",
        ": ",
        "{",
        "}",
        "[",
        "]",
        "&a ",
        "*a",
        "<<: *a",
        "!!python/object:os.system ",
        "? ",
        "|\n",
        ">\n",
        "#",
    ),
    *(
        "1",
        "-1",
        "1e400",
        ".nan",
        ".inf",
        "0x10",
        "2024-01-01",
        "true",
        "null",
        "~",
        '"',
        "'",
        "\t",
        "\ufeff",
        "---\n",
        "!!int ",
        "!!bool ",
        "!!timestamp ",
        "!!float ",
        "0b_",
        "2024-99-99",
    ),
    *(
        "pools:\n",
        "role: target\n",
        "role: draft\n",
        "workers: 2\n",
        "machines:\n",
        "gateway:\n",
        "speculation:\n  ",
        "keys: x\n",
    ),
    *(
        "model: x\n",
        "draft: y\n",
        "learning: true\n",
        "sampling: {temperature: 9}\n",
        "engine: vllm\n",
        "1: 2\n",
        "99999999999999999999",
    ),
)
folder = Path(tempfile.mkdtemp(prefix="paceline-fuzz-"))


def fuzz(data: bytes) -> bool:
    path = folder / "config.yaml"
    path.write_bytes(data)
    try:
        config = load_gateway_config(path, {}, {})
        if isinstance(config, GatewayConfig):
            config.models()
    except PacelineError:
        return False
    return True


TARGETS = {"config": FuzzTarget(fuzz, text_mutator(FRAGMENTS), 4096)}
