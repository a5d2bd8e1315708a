import torch

from paceline.kernels import native

# Tiny models are all overhead: more threads only get in each other's way, and in the way of other test processes.
torch.set_num_threads(1)
native.set_num_threads(1)
