import os


def get_sm_version():
    return int(os.environ.get("DOUBLE_SM", "120"))


def is_device_integrated():
    return False


def mpi_comm():
    from mpi4py import MPI
    from mpi4py.util import pkl5

    return pkl5.Intracomm(MPI.COMM_WORLD)
