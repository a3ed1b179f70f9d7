"""Serve a whole model with vLLM, with and without the package: ``python -m benchmarks.served OUT MODEL ...``."""
