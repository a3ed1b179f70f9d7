# SPDX-License-Identifier: Apache-2.0
"""Our own kernels in Triton: decode for few tokens, grouped block-scaled products for many."""
