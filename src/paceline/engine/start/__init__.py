"""What an engine does before it serves: it compiles kernels in other processes and captures CUDA graphs."""
