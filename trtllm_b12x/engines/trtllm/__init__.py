# SPDX-License-Identifier: Apache-2.0
"""TensorRT-LLM: the layer, its quantization methods and the promotion. The only code that imports tensorrt_llm."""
