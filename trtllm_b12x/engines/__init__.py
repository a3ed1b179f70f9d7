"""Inference engines that the kernels are plugged into."""
