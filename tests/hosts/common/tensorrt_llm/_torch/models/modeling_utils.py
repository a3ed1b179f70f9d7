# SPDX-License-Identifier: Apache-2.0
"""The registry of architectures that is handed to the workers."""

MODEL_CLASS_MAPPING = {}


def register_auto_model(name):
    def decorator(cls):
        MODEL_CLASS_MAPPING[name] = cls
        return cls

    return decorator
