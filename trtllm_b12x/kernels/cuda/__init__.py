"""Decode in one launch: CUDA C++ that NVRTC compiles and the driver launches."""
