"""The stages of `benchmarks/gpu.py`: what one GPU can show of this library, each with a figure and its control."""
