# SPDX-License-Identifier: Apache-2.0
_balancer = None


def get_moe_load_balancer():
    return _balancer
