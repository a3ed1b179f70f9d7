# SPDX-License-Identifier: Apache-2.0
def has_moe_lora_targets(lora_config):
    """``_torch.peft.lora.validation``: does the adapter reach routed experts?"""
    return any(name.startswith("moe_") for name in getattr(lora_config, "lora_target_modules", None) or ())
