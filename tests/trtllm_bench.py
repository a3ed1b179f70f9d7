# SPDX-License-Identifier: Apache-2.0
"""A stand-in for ``trtllm-bench``: its options, what it reads, and what it writes, without a model.

As TensorRT-LLM has them: ``bench/benchmark/throughput.py`` (56851033), ``bench/utils/data.py`` (04276b44), the form of
``--report_json`` by ``bench/dataclasses/reporting.py`` (02499765).  ``--config`` is there from 1.3 on (the commands' reference of
1.3.0rc26).  Environment: ``STAND_IN`` is ``1.2``, ``1.3`` or a way to fail, ``STAND_IN_CALLS`` a file that gets a line per run.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click

KIND = os.environ.get("STAND_IN", "1.3")
CONFIG = ("--extra_llm_api_options",) if KIND == "1.2" else ("--config", "--extra_llm_api_options")
TPOT_MS = {"1": 11.5, "0": 14.0}
CUTEDSL_MS = 11.0
TTFT_MS = 154.5


@click.group(name="trtllm-bench")
@click.option("--model", "-m", required=True)
@click.option("--model_path", type=click.Path(path_type=Path))
def main(**given: Any) -> None: ...


@main.command()
@click.option("--backend", type=click.Choice(["pytorch", "_autodeploy", "tensorrt"]), default="pytorch")
@click.option(*CONFIG, "config", type=str)
@click.option("--max_batch_size", type=int)
@click.option("--max_num_tokens", type=int)
@click.option("--dataset", type=click.Path(exists=True, readable=True, path_type=Path))
@click.option("--num_requests", type=int, default=0)
@click.option("--concurrency", type=int, default=-1)
@click.option("--streaming", is_flag=True)
@click.option("--report_json", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def throughput(**given: Any) -> None:
    with open(os.environ["STAND_IN_CALLS"], "a") as calls:
        switches = {name: value for name, value in os.environ.items() if name.startswith("TRTLLM_B12X")}
        calls.write(json.dumps({"argv": sys.argv[1:], "switches": switches}) + "\n")
    config = importlib.import_module("yaml").safe_load(Path(given["config"]).read_text())
    assert config["kv_cache_config"]
    requests = [json.loads(line) for line in given["dataset"].read_text().splitlines()][: given["num_requests"] or None]
    ((_, output_tokens),) = {(len(one["input_ids"]), one["output_tokens"]) for one in requests if one["task_id"] >= 0}
    on = os.environ.get("TRTLLM_B12X", "1")
    if KIND == "interrupt":
        os.kill(os.getppid(), signal.SIGINT)  # as Ctrl-C does
        time.sleep(60)
    if KIND == "crash":
        raise RuntimeError("CUDA out of memory")
    if on != "0" and KIND != "unserved":
        print("[trtllm_b12x] [INFO] rank 0: 40 of 40 MoE layers on b12x+triton, decode below 64 tokens (NVFP4)", file=sys.stderr)
    if KIND == "unserved":
        print("[trtllm_b12x] [WARNING] rank 0: layers stay on CUTLASS: FLASHINFER: none is installed", file=sys.stderr)
    tpot = TPOT_MS[on]
    if config["moe_config"]["backend"] == "CUTEDSL":
        assert on == "0"
        tpot = CUTEDSL_MS
        print("NVFP4CuteDslB12xFusedMoEMethod active: hidden=2048" if KIND != "fallback" else "CUTLASS serves", file=sys.stderr)
    if KIND == "no report":
        return
    at_once = min(given["concurrency"], len(requests)) if given["concurrency"] > 0 else len(requests)
    total = (TTFT_MS + tpot * (output_tokens - 1)) * -(-len(requests) // at_once)
    speed = 1e3 * len(requests) * output_tokens / total
    report: dict[str, Any] = {
        "request_info": {"num_requests": len(requests)},
        "performance": {"system_output_throughput_tok_s": speed},
    }
    if given["streaming"]:
        times = {"tpot": tpot, "ttft": TTFT_MS}
        kinds = ("p50", "p90", "p95", "p99", "minimum", "maximum", "average")
        report["streaming_metrics"] = {f"{name}_percentiles": dict.fromkeys(kinds, ms) for name, ms in times.items()}
    given["report_json"].write_text(json.dumps(report, indent=4))


if __name__ == "__main__":
    main()
