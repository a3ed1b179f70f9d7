# SPDX-License-Identifier: Apache-2.0
"""Time whole MoE layers beside other kernels for the same experts: ``python -m benchmarks.peers OUT``."""
