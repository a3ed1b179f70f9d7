"""The registry of architectures that is handed to the workers."""

from collections.abc import Callable

MODEL_CLASS_MAPPING: dict[str, type] = {}


def register_auto_model(name: str) -> Callable[[type], type]:
    def decorator(cls: type) -> type:
        MODEL_CLASS_MAPPING[name] = cls
        return cls

    return decorator
