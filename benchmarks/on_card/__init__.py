"""Prove it on your card: kernels and whole models, with and without the package, in one report.

``python -m benchmarks.on_card OUT --model MODEL`` from a checkout, with the Python of TensorRT-LLM; ``--help`` says the rest.
"""
