# SPDX-License-Identifier: Apache-2.0
"""Time our experts beside Marlin's in vLLM's modular kernel: ``python -m benchmarks.vllm OUT`` on a GPU."""
