# SPDX-License-Identifier: Apache-2.0
"""Decode in one launch, and grouped products: CUDA C++ that NVRTC compiles and the driver launches."""
