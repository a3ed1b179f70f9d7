# SPDX-License-Identifier: Apache-2.0
"""vLLM adapter: experts on our kernels, which read vLLM's tensors in place, and the rebound names. Only this code imports vllm.

vLLM calls ``plugin.register`` in each of its processes; everything else is imported when vLLM chooses experts.
"""
