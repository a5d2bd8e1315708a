from importlib.util import find_spec

import torch

if find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
elif not torch.cuda.is_available():
    from tests.kernels.gpu import interpreter

    interpreter.repair()
