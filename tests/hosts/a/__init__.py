# SPDX-License-Identifier: Apache-2.0
from .create_moe import create_moe, get_moe_cls

__all__ = ["create_moe", "get_moe_cls"]  # create_moe is the function
