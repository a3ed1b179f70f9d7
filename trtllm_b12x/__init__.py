# SPDX-License-Identifier: Apache-2.0
"""Fast decode of quantized mixture-of-experts layers in TensorRT-LLM's CUTLASS backend, on SM120 and SM121."""

TYPE_CHECKING = False  # every Python process imports this module, so it does not import typing
if TYPE_CHECKING:
    from trtllm_b12x.engines.trtllm.status import Status

    from .decision import Resolution


def install() -> None:
    """Replace the CUTLASS backend of TensorRT-LLM in this process; see ``trtllm_b12x.engines.trtllm.promote.install``."""
    from trtllm_b12x.engines.trtllm import promote

    promote.install()


def explain(model_config: object, override_quant_config: object = None) -> "Resolution":
    """Explain which kernels serve the layers of a ``ModelConfig`` in this process, and why the others do not.

    Printing the result shows every reason with its remedy. ``override_quant_config`` is the quantization of one layer, if the
    layer differs from the model. Raise TypeError if ``model_config`` is not a ``ModelConfig``.
    """
    from trtllm_b12x.engines.trtllm import describe, machine

    quantization = describe.quantization_of(model_config, override_quant_config)
    if quantization is None:
        raise TypeError(f"{type(model_config).__name__} is not a ModelConfig: it has no quant_config")
    return machine.resolve(describe.from_config(model_config, quantization))


def uninstall() -> None:
    """Undo ``install``."""
    from trtllm_b12x.engines.trtllm import promote

    promote.uninstall()


def status() -> "Status":
    """Return the ``trtllm_b12x.engines.trtllm.status.Status`` of the MoE layers in this process."""
    from trtllm_b12x.engines.trtllm import status as registry

    return registry.status()


def __getattr__(name: str) -> str:
    if name == "__version__":
        from .core.version import __version__

        return __version__
    raise AttributeError(name)
