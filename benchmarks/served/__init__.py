# SPDX-License-Identifier: Apache-2.0
"""Serve a whole model with vLLM, with and without the package: ``python -m benchmarks.served OUT MODEL ...``."""
