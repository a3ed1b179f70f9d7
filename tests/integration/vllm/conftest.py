from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("vllm") else ["test_vllm.py", "test_device.py", "test_ranks.py"]
"""Tests of vLLM run where it is installed: ``make vllm``."""
