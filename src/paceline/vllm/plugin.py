"""The entry point that vLLM loads in each of its processes (`vllm.general_plugins`)."""

import os

from paceline.vllm.settings import check_version

COUPLED = "PACELINE_COUPLED_SAMPLING"
"""Environment variable. With 1 the plugin samples with our noise, with and without speculation. vLLM gives a plugin no setting
but the environment before it has chosen a model runner."""


def register() -> None:
    """Install coupled sampling if `PACELINE_COUPLED_SAMPLING=1`. Otherwise vLLM is left as it is. May be called repeatedly."""
    if os.environ.get(COUPLED) != "1":
        return
    check_version()
    # The second model runner samples on the device by another path
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from paceline.vllm.replacements import replace_sampling

    replace_sampling()
