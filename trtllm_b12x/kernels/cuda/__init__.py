"""Decode in one launch, and grouped products: CUDA C++ that NVRTC compiles and the driver launches."""
