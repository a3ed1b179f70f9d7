"""Whole MoE layers timed beside other kernels for the same experts: ``python -m benchmarks.peers OUT``."""
