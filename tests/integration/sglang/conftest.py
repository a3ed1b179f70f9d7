# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
from pathlib import Path

collect_ignore = [] if importlib.util.find_spec("sglang") else [path.name for path in Path(__file__).parent.glob("test_*.py")]
"""Tests of SGLang run where it is installed: ``make sglang``."""
