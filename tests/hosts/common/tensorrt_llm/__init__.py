# SPDX-License-Identifier: Apache-2.0
"""A double of TensorRT-LLM for processes without a GPU: the MoE package of one generation, and what that imports.

``tests.hosts.build`` composes it.  Numbers, layouts and records are those of :mod:`trtllm_b12x.engines.trtllm.embedded`; names,
signatures, the order of calls and the comparisons of classes are the generation's own
(``trtllm_b12x/engines/trtllm/facts.json``).
"""

from . import _ops  # noqa: F401

__version__ = "double"
