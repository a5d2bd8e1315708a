"""The methods of vLLM's classes that the plugin replaces. No other module replaces methods of vLLM.

`CoupledSampling` also replaces `sample` of the sampler object that it is made for.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from paceline.vllm.settings import check_version

MARK = "paceline_replacement"


def replace_sampling() -> None:
    """Sample with our noise (`coupled.py`), in every model runner of this process."""
    from paceline.vllm.coupled import CoupledSampling

    of_runner: WeakKeyDictionary[Any, CoupledSampling] = WeakKeyDictionary()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def sample(runner: Any, logits: Any, spec_decode_metadata: Any) -> Any:
            if logits is None or runner.input_batch.sampling_metadata.all_greedy:
                return original(runner, logits, spec_decode_metadata)
            sampling = of_runner.get(runner)
            if sampling is None:
                sampling = of_runner[runner] = CoupledSampling(runner)
            return sampling.sample(logits, spec_decode_metadata)

        return sample

    _replace("_sample", wrap)


def replace_graphs(drafter: type) -> None:
    """Capture decode graphs for steps without drafts (`graphs.py`), in model runners whose drafter is one of ours."""
    from paceline.vllm.graphs import use_decode_graphs

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def check_mode(runner: Any, attention_backends: Any, kv_cache_groups: Any, *args: Any, **options: Any) -> Any:
            if isinstance(getattr(runner, "drafter", None), drafter):
                use_decode_graphs(runner, attention_backends, kv_cache_groups)
            return original(runner, attention_backends, kv_cache_groups, *args, **options)

        return check_mode

    _replace("_check_and_update_cudagraph_mode", wrap)


def _replace(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of vLLM's model runner. It is replaced once, whatever the number of calls."""
    check_version()
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = getattr(GPUModelRunner, name)
    if hasattr(original, MARK):
        return
    replacement = wrap(original)
    setattr(replacement, MARK, True)
    setattr(GPUModelRunner, name, replacement)
