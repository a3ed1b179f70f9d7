# SPDX-License-Identifier: Apache-2.0
"""Inference engines that the kernels are plugged into."""
