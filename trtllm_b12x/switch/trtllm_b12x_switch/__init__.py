# SPDX-License-Identifier: Apache-2.0
"""Install promotion for ``--custom_module_dirs``, where no ``.pth`` file is read: in the process with the option and its workers.

TensorRT-LLM puts this folder's parent on ``sys.path`` and imports the folder by name. The parent must contain nothing else.
"""

import trtllm_b12x
from trtllm_b12x.core import log, settings
from trtllm_b12x.engines.trtllm import host


class TrtllmB12xSwitch:
    """Never instantiated. Workers get registered model classes by reference, so they import this module before they build."""


if settings.ENABLED():
    trtllm_b12x.install()
    try:
        host.register_carrier(TrtllmB12xSwitch)
    except Exception as error:  # an error here would end the server
        log.logger.warning("workers are not reached by --custom_module_dirs: %s: %s", type(error).__name__, error)
