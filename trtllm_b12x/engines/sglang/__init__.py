# SPDX-License-Identifier: Apache-2.0
"""SGLang adapter: experts of ``flashinfer_cutlass`` and ``flashinfer_mxfp4`` decode on our kernels, on SGLang's own tensors."""
