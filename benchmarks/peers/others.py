"""The peers by the name of their lines in the JSON."""

from __future__ import annotations

from benchmarks.peers import flashinfer, marlin, torch_grouped, triton_kernels
from benchmarks.peers.layers import Peer

PEERS: dict[str, Peer] = {
    "marlin": Peer("vLLM's Marlin", "W4A16 NVFP4", marlin.lacks, marlin.layers),
    "triton_kernels": Peer("OpenAI's triton_kernels", "W4A16 MXFP4", triton_kernels.lacks, triton_kernels.layers),
    "flashinfer": Peer("FlashInfer's B12xMoEWrapper", "W4A4 NVFP4", flashinfer.lacks, flashinfer.layers),
    "torch_grouped": Peer("torch._grouped_mm, products alone", "W16A16", torch_grouped.lacks, torch_grouped.layers),
}
