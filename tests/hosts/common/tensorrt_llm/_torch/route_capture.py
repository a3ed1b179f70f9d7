# SPDX-License-Identifier: Apache-2.0
"""Router Replay keeps the ids of each call, of layers that get some."""

from .utils import get_model_extra_attrs


def get_active_route_capture():
    attrs = get_model_extra_attrs()
    return attrs.get("route_capture") if attrs else None


def assert_capturable(backend):
    if not backend._supports_load_balancer():
        raise RuntimeError(f"{type(backend).__name__} routes in its kernel")
