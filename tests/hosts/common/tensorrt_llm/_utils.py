import os
from typing import Any


def get_sm_version() -> int:
    return int(os.environ.get("DOUBLE_SM", "120"))


def is_device_integrated() -> bool:
    return False


def mpi_comm() -> Any:
    from mpi4py import MPI
    from mpi4py.util import pkl5

    return pkl5.Intracomm(MPI.COMM_WORLD)
