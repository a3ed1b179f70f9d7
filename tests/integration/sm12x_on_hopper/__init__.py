# SPDX-License-Identifier: Apache-2.0
"""Kernels for SM120 and SM121, FlashInfer's and our own, run on a Hopper GPU: for whoever has the code and not the card.

The CuTe DSL, Triton and NVRTC compile them for ``sm_120a`` on any machine.  Their PTX is valid on ``sm_90a`` but for a few
instructions, each of which has an exact equivalent there.  ``docs/sm12x-on-hopper.md`` says what this proves and what it can not.

=================== ===============================================================================
translate.py        PTX for ``sm_120a`` to PTX for ``sm_90a``, as a table of rules
instructions.cu     the missing instructions as device functions
loader.c            what is linked with a kernel's host object: other cubin, rewritten tensor maps
build.py            compile, translate, assemble, link; a cache that may travel
bed.py              the context manager :func:`sm12x_on_hopper`
problem.py          a layer's tensors, drawn
kernels.py          the kernels that are built
run.py              one run on a device, to JSON
own.py, pool.py     the package's own kernels: Triton's and NVRTC's last step, translated
own_run.py          runs of them on a device, to JSON
=================== ===============================================================================
"""

from .bed import Bed, sm12x_on_hopper
from .build import Options
from .translate import UnknownInstructionError

__all__ = ["Bed", "Options", "UnknownInstructionError", "sm12x_on_hopper"]
