"""The peers by the name of their lines in the JSON."""

from __future__ import annotations

from benchmarks.peers import dequantize, flashinfer, marlin, torch_grouped, triton_kernels
from benchmarks.peers.layers import Peer

_MARLIN = "Marlin has our weights, with hidden size padded to 256 and intermediate size to 128, as vLLM pads gpt-oss."
_TRITON = "triton_kernels has weights of its own, starts from logits, and its SwiGLU multiplies by up + 1 on every layer."
_FLASHINFER = "FlashInfer has FP4 activations; its input scales are not calibrated here, so no error is computed."
_DEQUANTIZE = "Dequantize-then-multiply is TensorRT-LLM's way with torch's grouped product; sorting is not in its time."
_GROUPED = "torch._grouped_mm has bfloat16 weights of its own; no activation and no sum are in its time."

PEERS: dict[str, Peer] = {
    "marlin": Peer("vLLM's Marlin", "W4A16 NVFP4", marlin.lacks, _MARLIN, marlin.layers),
    "triton_kernels": Peer("OpenAI's triton_kernels", "W4A16 MXFP4", triton_kernels.lacks, _TRITON, triton_kernels.layers),
    "flashinfer": Peer("FlashInfer's B12xMoEWrapper", "W4A4 NVFP4", flashinfer.lacks, _FLASHINFER, flashinfer.layers),
    "dequantize": Peer("dequantize, then multiply", "W16A16 of NVFP4", dequantize.lacks, _DEQUANTIZE, dequantize.layers),
    "torch_grouped": Peer("torch._grouped_mm, products alone", "W16A16", torch_grouped.lacks, _GROUPED, torch_grouped.layers),
}
