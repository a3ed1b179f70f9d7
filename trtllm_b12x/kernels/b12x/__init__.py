# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's SM12x kernels: static and direct micro."""
