"""Quantized mixture-of-experts decode inside TensorRT-LLM's CUTLASS backend, on SM120 and SM121."""

TYPE_CHECKING = False  # not from typing: every Python process of the environment runs this module
if TYPE_CHECKING:
    from .decision import Resolution
    from .registry import Status


def install() -> None:
    """Promote the CUTLASS backend of this process's host; see :func:`trtllm_b12x.selection.install`."""
    from . import selection

    selection.install()


def explain(model_config: object, override_quant_config: object = None) -> "Resolution":
    """Which kernels serve a host's ``ModelConfig`` and why not the others, as the CUTLASS backend will get it in this process.

    Args:
        model_config: as ``get_moe_cls`` takes it.
        override_quant_config: of one layer, where it differs.

    Raises:
        TypeError: ``model_config`` is something else.

    Returns:
        A :class:`trtllm_b12x.decision.Resolution`; printing it gives every reason with its remedy.
    """
    from . import eligibility
    from .host import questions

    question = questions.of_model(model_config, override_quant_config)
    if question is None:
        raise TypeError(f"{type(model_config).__name__} is no ModelConfig of the host: it has no quant_config")
    return eligibility.resolve(question)


def uninstall() -> None:
    """Undo :func:`install`."""
    from . import selection

    selection.uninstall()


def status() -> "Status":
    """What became of this process's MoE layers: a :class:`trtllm_b12x.registry.Status`, for people and for tests."""
    from . import registry

    return registry.status()


def __getattr__(name: str) -> str:
    if name == "__version__":
        from .core.version import __version__

        return __version__
    raise AttributeError(name)
