"""Triton kernels, one operation a file, each pinned to its torch reference by tests/kernels/gpu.

These modules import triton, which CPU installations lack: import them inside the function that has found a CUDA device.

No kernel's grid or shape depends on values in device memory, wrappers allocate nothing when they are given `out` and
scratch, and nothing waits for the device: all of it may be captured in a CUDA graph and replayed as contexts grow.
Every kernel waits for the one before it (`launch.py`), also where it has nothing to do: its end would otherwise tell the
next one that memory is complete when it is not.
"""
