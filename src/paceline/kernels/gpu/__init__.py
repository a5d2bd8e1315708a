"""Triton kernels, one operation per file. tests/kernels/gpu compares each with its torch reference."""

# These modules import triton, which CPU installations lack. Import them inside a function that has checked for a CUDA device.
#
# All kernels can be captured in a CUDA graph and replayed as contexts grow: grids and shapes do not depend on device values,
# wrappers allocate nothing if they are given `out` and scratch, and no wrapper waits for the device.
#
# HAZARD: every kernel waits for the one before it (`launch.py`), even if it has nothing to do. Otherwise its end would signal
# to the next kernel that memory is complete when it is not.
