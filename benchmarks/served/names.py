# SPDX-License-Identifier: Apache-2.0
"""Names that vLLM's workers know, for processes that do not import vLLM."""

DRAWN, CHECKPOINT = "served_drawn", "served_checkpoint"
"""Load formats of ``worker.py``."""
EXTENSION = "benchmarks.served.worker.ServedWorker"
JOB = "SERVED_JOB"
"""Environment variable with the job's file."""
