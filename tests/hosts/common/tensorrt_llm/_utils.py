# SPDX-License-Identifier: Apache-2.0
import os


def get_sm_version():
    return int(os.environ.get("DOUBLE_SM", "120"))
