_balancer = None


def get_moe_load_balancer():
    return _balancer
