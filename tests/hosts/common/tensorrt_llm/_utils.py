import os


def get_sm_version() -> int:
    return int(os.environ.get("DOUBLE_SM", "120"))


def is_device_integrated() -> bool:
    return False
