"""FlashInfer's SM12x kernels: static and direct micro."""
