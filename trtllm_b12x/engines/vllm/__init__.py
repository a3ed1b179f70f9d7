"""vLLM: experts on our kernels, which read its tensors in place, and the rebound names. The only code that imports vllm.

vLLM calls ``plugin.register`` in each of its processes; everything else is imported when it chooses experts.
"""
