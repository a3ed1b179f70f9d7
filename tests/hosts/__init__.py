# SPDX-License-Identifier: Apache-2.0
"""Doubles of TensorRT-LLM, one per generation, and the facts that they are held to."""
