"""cuBLAS's grouped product (``cublasGemmGroupedBatchedEx``, since 12.5), which torch does not call: a yardstick for many experts.

Source of names, numbers and the order of arguments: NVIDIA's cuBLAS documentation, 2.8, "cublasGemmGroupedBatchedEx".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

_BFLOAT16, _COMPUTE_FLOAT32, _PLAIN, _TRANSPOSED = 14, 68, 0, 1


def library() -> ctypes.CDLL:
    """The cuBLAS that torch has loaded.

    Raises:
        OSError: it has none, or one without the function.
    """
    torch.cuda.current_blas_handle()
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcublas.so" in line}
    if not paths:
        raise OSError("torch has loaded no libcublas")
    found = ctypes.CDLL(min(paths))
    if not hasattr(found, "cublasGemmGroupedBatchedEx"):
        raise OSError(f"{min(paths)} has no grouped product: it is older than 12.5")
    return found


def grouped(
    inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> Callable[[], None]:
    """A call that multiplies each ``(n, K)`` with its ``(N, K)`` transposed into its ``(n, N)``, contiguous bfloat16, as one.

    Raises:
        OSError: see :func:`library`.
        RuntimeError: the call's, where cuBLAS answers with an error.
    """
    count, cublas = len(inputs), library()

    def ints(values: Sequence[int]) -> ctypes.Array[ctypes.c_int]:
        return (ctypes.c_int * count)(*values)

    def addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device="cuda")

    # In the order of columns a product of rows is W^T x X.
    inner, columns = [w.shape[1] for w in weights], [w.shape[0] for w in weights]
    a, b, c = addresses(weights), addresses(inputs), addresses(outputs)
    one, zero = (ctypes.c_float * count)(*[1.0] * count), (ctypes.c_float * count)()
    shapes = ints(columns), ints([len(x) for x in inputs]), ints(inner)
    flags = ints([_TRANSPOSED] * count), ints([_PLAIN] * count)
    strides = ints(inner), ints(inner), ints(columns)
    each = ints([1] * count)

    def call(_kept: object = (inputs, weights, outputs)) -> None:  # addresses alone keep no tensor
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, c)]
        status = cublas.cublasGemmGroupedBatchedEx(
            handle, *flags, *shapes, one,
            pointers[0], _BFLOAT16, strides[0], pointers[1], _BFLOAT16, strides[1], zero,
            pointers[2], _BFLOAT16, strides[2], count, each, _COMPUTE_FLOAT32,
        )  # fmt: skip
        if status:
            raise RuntimeError(f"cublasGemmGroupedBatchedEx: status {status}")

    return call
