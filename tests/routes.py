# SPDX-License-Identifier: Apache-2.0
"""Small rows of router logits, and the routes that the operators of both engines make of them on CUDA."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtllm_b12x.formats.geometry import Scoring


@dataclass(frozen=True)
class Row:
    """One token's logits."""

    scoring: Scoring
    logits: tuple[float, ...]
    ids: tuple[int, ...]
    weights: tuple[float, ...]
    bias: tuple[float, ...] | None = None
    dtype: torch.dtype = torch.float32

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.tensor([self.logits]).to(self.dtype), None if self.bias is None else torch.tensor(self.bias)


_SOFTMAX, _OVER_ALL = Scoring(), Scoring(renormalize=False)
_SIGMOID, _AS_IT_IS = Scoring("sigmoid"), Scoring("sigmoid", renormalize=False)
_MINIMAX, _DEEPSEEK = Scoring("sigmoid", bias=True), Scoring("sigmoid_tanh", bias=True)
_INF = float("inf")

ROWS = {
    "softmax of the chosen": Row(_SOFTMAX, (1, 3, 2, 0), (1, 2), (0.7310586, 0.2689414)),
    "softmax of all": Row(_OVER_ALL, (0, 1.0986123, 0, 0), (1,), (0.5,)),  # 3 of 6
    "of equal logits the lower expert": Row(_SOFTMAX, (0, 1, 1, 1), (1, 2), (0.5, 0.5)),
    "all logits are equal": Row(_SOFTMAX, (2, 2, 2, 2), (0, 1, 2), (1 / 3, 1 / 3, 1 / 3)),
    "equal in bfloat16": Row(_SOFTMAX, (1, 1.001, 0), (0, 1), (0.5, 0.5), dtype=torch.bfloat16),
    "not equal in float32": Row(_SOFTMAX, (1, 1.001, 0), (1, 0), (0.50025, 0.49975)),
    "masked experts come last, by id": Row(_SOFTMAX, (-_INF, 0, -_INF, 0), (1, 3, 0), (0.5, 0.5, 0)),
    "large logits": Row(_SOFTMAX, (100, -100, 99, 100), (0, 3, 2), (0.4223188, 0.4223188, 0.1553624)),
    "as many routes as experts": Row(_SOFTMAX, (0, 1.0986123), (1, 0), (0.75, 0.25)),
    "sigmoid, shares of the chosen": Row(_SIGMOID, (0, 2, -2), (1, 0), (0.6378902, 0.3621098)),
    "sigmoid as it is": Row(_AS_IT_IS, (0, 2, -2), (1, 0), (0.8807971, 0.5)),
    "sigmoids that are 1 are equal": Row(_SIGMOID, (20, 30, 25), (0, 1), (0.5, 0.5)),
    "the bias chooses, and is in no weight": Row(_MINIMAX, (0, 2, -2), (2, 1), (0.1192029, 0.8807971), bias=(0, 0, 1)),
    "sums of sigmoid and bias that are equal": Row(_MINIMAX, (0, 0, 0), (1, 2), (0.5, 0.5), bias=(0, 1, 1)),
    "DeepSeek's factor": Row(
        Scoring("sigmoid_tanh", bias=True, factor=2.5), (0, 2, -2), (2, 1), (0.2980073, 2.2019927), bias=(0, 0, 1)
    ),
    "DeepSeek, sigmoids that are 1": Row(_DEEPSEEK, (17.5, 30, 40, 0), (0, 1), (0.5, 0.5), bias=(0, 0, 0, 0)),
}
"""Each is a rule on which two operators could differ."""
