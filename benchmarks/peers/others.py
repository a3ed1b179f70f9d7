# SPDX-License-Identifier: Apache-2.0
"""The peers by the name of their lines in the JSON."""

from __future__ import annotations

from benchmarks.peers import dequantize, marlin, triton_kernels
from benchmarks.peers.layers import Peer

_MARLIN = "Marlin has our weights, with hidden size padded to 256 and intermediate size to 128, as vLLM pads gpt-oss."
_TRITON = "triton_kernels has weights of its own, starts from logits, and its SwiGLU multiplies by up + 1 on every layer."
_DEQUANTIZE = "Dequantize-then-multiply is TensorRT-LLM's way with torch's grouped product; sorting is not in its time."

PEERS: dict[str, Peer] = {
    "marlin": Peer("vLLM's Marlin", "W4A16 NVFP4", marlin.lacks, _MARLIN, marlin.layers),
    "triton_kernels": Peer("OpenAI's triton_kernels", "W4A16 MXFP4", triton_kernels.lacks, _TRITON, triton_kernels.layers),
    "dequantize": Peer("dequantize, then multiply", "W16A16 of NVFP4", dequantize.lacks, _DEQUANTIZE, dequantize.layers),
}
