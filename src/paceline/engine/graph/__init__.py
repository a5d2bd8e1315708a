"""Draft, verify and accept captured as CUDA graphs, submitted one step ahead."""
