"""Stages of `benchmarks/gpu.py`: tests of this library on a GPU, each with a figure and its control."""
