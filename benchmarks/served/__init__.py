"""A model served whole by vLLM with and without the package: ``python -m benchmarks.served OUT MODEL ...``."""
