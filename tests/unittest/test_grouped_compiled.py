"""The grouped kernels compiled without a GPU: block-scaled products where the card has them, and nothing of bfloat16 beside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests import sass
from trtllm_b12x.environment import prove
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.cards import Card
from trtllm_b12x.kernels.triton.grouped import GroupedKernel, GroupedNVFP4Kernel

INSTRUCTION = {GroupedKernel: "kind::mxf8f6f4.block_scale", GroupedNVFP4Kernel: "kind::mxf4nvf4.block_scale.scale_vec::4X"}
QWEN3_30B = Geometry(128, 8, 2048, 768, "Swiglu")


@pytest.mark.parametrize("capability", [120, 121])
@pytest.mark.parametrize("kind", [GroupedKernel, GroupedNVFP4Kernel])
def test_products_are_native(kind: type[GroupedKernel], capability: int, tmp_path: Path) -> None:
    """Where this Triton has them; where not, the products are what the refusal says.  Of the second card the largest tiles."""
    kernel, names = kind(Card(48, 100 << 10, capability)), []
    if capability == 121:
        kernel.table = kind.table[-1:]  # type: ignore[misc]
    kernel.describe(QWEN3_30B, 4096, torch.device("cuda"))
    for variant in kernel.variants():
        name, made = variant.name, variant.assemble(capability)
        names.append(name)
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        used = sass.resources(cubin)
        if not toolchain.upcast(capability):
            assert used["STACK"] == used["LOCAL"] == 0, (name, used)
            assert made.metadata.shared <= 99 << 10
            # Scales too are on their way while products are made; of six steps ptxas makes no loop.
            assert not any(code.startswith("LDG.") for code in sass.product_loop(cubin)), name
        products = set(re.findall(r"(?:wg)?mma\.[\w.:]+", made.asm["ptx"]))
        assert bool(products) is (name in ("fc1_kernel", "fc2_kernel"))
        native = {product for product in products if INSTRUCTION[kind] in product}
        assert products == native if not toolchain.upcast(capability) else not native
    assert names.count("fc1_kernel") == len({rule.fc1 for rule in kernel.table})
    assert names.count("fc2_kernel") == len({rule.fc2 for rule in kernel.table})


def test_proof() -> None:
    """Of both formats."""
    proof = prove.prove("sm_120a", "grouped")
    assert (proof.compiled, proof.error) == (True, "")
    assert proof.products > 0
