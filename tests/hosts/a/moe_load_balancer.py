from typing import Any

_balancer: Any = None


def get_moe_load_balancer() -> Any:
    return _balancer
