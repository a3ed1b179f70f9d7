# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
from pathlib import Path

collect_ignore = [] if importlib.util.find_spec("vllm") else [path.name for path in Path(__file__).parent.glob("test_*.py")]
"""Tests of vLLM run where it is installed: ``make vllm``."""
