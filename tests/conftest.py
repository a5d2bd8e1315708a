import os

import torch

from paceline.kernels import native

# Triton decides when it is imported: where there is no GPU, its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tiny models are all overhead: more threads only get in each other's way, and in the way of other test processes.
torch.set_num_threads(1)
native.set_num_threads(1)
