import subprocess
import sys

SCRIPT = """
import sys
from triton.runtime.jit import JITFunction
from paceline.kernels.gpu import linear
kernels = {name: value for name, value in vars(linear).items() if isinstance(value, JITFunction)}
print(sorted((name, kernels[name].cache_key) for name in sorted(kernels, reverse=sys.argv[1] == "reverse")))
"""


def test_the_key_of_a_kernel_does_not_depend_on_the_order_of_launches() -> None:
    keys = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT, order],
            env={"TRITON_INTERPRET": "0", "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for order in ("forward", "reverse")
    }
    assert len(keys) == 1
