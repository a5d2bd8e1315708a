import subprocess
import sys

SCRIPT = """
import os
from triton.runtime.jit import JITFunction
from paceline.kernels.gpu import linear
is_child = os.fork() == 0
kernels = {name: value for name, value in vars(linear).items() if isinstance(value, JITFunction)}
keys = sorted((name, kernels[name].cache_key) for name in sorted(kernels, reverse=is_child))
if not is_child:
    os.wait()
print(keys, flush=True)
"""


def test_the_key_of_a_kernel_does_not_depend_on_the_order_of_launches() -> None:
    """Keys are computed once in a process, so two processes compute them in two orders."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"TRITON_INTERPRET": "0", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert first == second
    assert "linear_kernel" in first
