import importlib.util

from tensorrt_llm._utils import get_sm_version

from .impl_contract import MoEEnvironment


def collect_moe_environment() -> MoEEnvironment:
    deps = tuple(name for name in ("flashinfer",) if importlib.util.find_spec(name) is not None)
    return MoEEnvironment(sm=get_sm_version(), available_deps=deps)
