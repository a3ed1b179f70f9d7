# SPDX-License-Identifier: Apache-2.0
from .create_moe import create_moe, resolve_moe_cls

__all__ = ["create_moe", "resolve_moe_cls"]  # create_moe is the function
