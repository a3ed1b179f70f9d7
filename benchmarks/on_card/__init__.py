# SPDX-License-Identifier: Apache-2.0
"""Measure kernels and whole models on your card, with and without the package, in one report.

Run ``python -m benchmarks.on_card OUT --model MODEL`` from a checkout, with the engine's Python; ``--help`` lists the rest.
"""
