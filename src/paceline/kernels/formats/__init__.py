"""The types that the kernels share: weights in the order in which kernels read them, activations, samplers."""
