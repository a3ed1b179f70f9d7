# SPDX-License-Identifier: Apache-2.0
"""How promotion reaches a process, whoever starts it: the parent, a worker of MPI or Ray, a spawned child."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from tests.hosts.scenarios import build_and_run, model_config


def before_import() -> dict[str, Any]:
    import trtllm_b12x

    trtllm_b12x.install()
    assert "tensorrt_llm" not in sys.modules
    return build_and_run()


def after_import() -> dict[str, Any]:

    import trtllm_b12x

    trtllm_b12x.install()
    trtllm_b12x.install()
    return build_and_run()


def by_itself() -> dict[str, Any]:
    """Nothing of ours is called: only what the interpreter's start has done."""
    return build_and_run()


def no_handler_of_its_own() -> dict[str, Any]:
    """The same, in a process that sets no handler of its own."""
    return build_and_run(listen=False)


def mpi_worker() -> dict[str, Any]:
    """In a worker that TensorRT-LLM's session would spawn: only variables of its own names arrive, and its ``sys.path``."""
    from mpi4py.futures import MPIPoolExecutor

    variables = {name: value for name, value in os.environ.items() if name.startswith(("TRTLLM", "TLLM"))}
    with MPIPoolExecutor(max_workers=1, path=sys.path, env=variables) as pool:
        result: dict[str, Any] = pool.submit(build_and_run).result()
    return result


def spawned() -> dict[str, Any]:
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(build_and_run)


def ray_ranks() -> dict[str, Any]:
    """Two actors as the host's Ray executor has them, each with its rank of a model."""
    import ray
    from torch.distributed import TCPStore

    from tests.hosts.scenarios import starts

    # As RayExecutor tells its workers; for the whole job: nothing is started that does not serve.
    port = TCPStore("localhost", 0, is_master=True, wait_for_workers=False).port
    told = {"TLLM_DISABLE_MPI": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    environment = {"env_vars": {**os.environ, **told}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    try:
        ranks: list[Any] = [ray.remote(starts.RayRank).remote(rank) for rank in range(2)]
        models = ray.get([rank.model.remote() for rank in ranks], timeout=120)
        return {"models": models}
    finally:
        ray.shutdown()


class RayRank:
    def __init__(self, rank: int) -> None:
        import torch

        self._rank = rank
        where = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        torch.distributed.init_process_group("gloo", init_method=where, world_size=2, rank=rank)

    def model(self) -> dict[str, Any]:
        from tensorrt_llm.mapping import Mapping

        mapping = Mapping(world_size=2, rank=self._rank, tp_size=2, moe_ep_size=2)
        return build_and_run(model_config(skip_create_weights_in_init=True, mapping=mapping))


def worker_main(_torch_model_class_mapping: dict[str, type]) -> dict[str, Any]:
    """What a worker gets: classes by reference, whose modules it imports to unpickle them."""
    return {**build_and_run(), "classes": sorted(_torch_model_class_mapping)}


def custom_module_dirs(directory: str) -> dict[str, Any]:
    """The option in the parent: the folder's parent on the path, the folder imported by name.  The model is built in a worker."""
    from mpi4py.futures import MPIPoolExecutor

    folder = Path(directory)
    sys.path.insert(0, str(folder.parent))
    importlib.import_module(folder.name)
    from tensorrt_llm._torch.models.modeling_utils import MODEL_CLASS_MAPPING

    from tests.hosts.scenarios import starts

    with MPIPoolExecutor(max_workers=1, path=sys.path, env={}) as pool:
        result: dict[str, Any] = pool.submit(starts.worker_main, MODEL_CLASS_MAPPING).result()
    return result
