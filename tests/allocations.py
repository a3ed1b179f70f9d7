# SPDX-License-Identifier: Apache-2.0
"""What torch allocates on one thread, as a memory pool of ``torch.cuda.use_mem_pool`` does; and what is left of it."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trtllm_b12x.formats.weights import tensors_of
from trtllm_b12x.kernels import MoECall


class Allocations(TorchDispatchMode):
    """Tensors that torch's operators returned on this thread with memory that none of their arguments holds."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        storages = (x.untyped_storage() if isinstance(x, torch.Tensor) else x for x in tree_leaves((args, kwargs)))
        given = {storage.data_ptr() for storage in storages if isinstance(storage, torch.UntypedStorage)}
        for made in (x for x in tree_leaves(result) if isinstance(x, torch.Tensor)):
            storage = made.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in given:
                self.names.append(str(function))
                self.tensors.append(made.detach())
        return result

    def discard(self) -> None:
        """Put other pages in the place of all that was allocated, as vLLM's sleep level 2 does. NaN in any float type."""
        for tensor in self.tensors:
            storage: Any = tensor.untyped_storage()
            storage.fill_(255)


def weights_left(kernels: list[Any], call: MoECall) -> list[str]:
    """Run and delete the only kernel of the list. Return the names of its weights that live while its plan does."""
    plan, weights = kernels[0]._plan, kernels[0].weights
    tensors = weights.tensors() | tensors_of(weights.epilogue)
    held = {name: StorageWeakRef(tensor.untyped_storage()) for name, tensor in tensors.items()}
    kernels.pop().run(call)
    del weights, tensors
    gc.collect()
    assert plan
    return [name for name, storage in held.items() if not storage.expired()]
