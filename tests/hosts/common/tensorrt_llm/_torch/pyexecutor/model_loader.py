# SPDX-License-Identifier: Apache-2.0
"""The order in which a model comes to be: built on meta tensors, or anew if that fails; moved; loaded by many threads; walked.

Source: ``ModelLoader.load`` of every generation (ids 57588011916 and 56800572848 of the code index), and ``MetaInitMode`` of
``models/modeling_utils.py`` (ids 1046435088 and 57359368733).  ``checkpoint_format: MX`` since late 1.3 (ids 55196330698 and
51771642756; ``modelexpress.trtllm_live_transfer``, id 56799963122), groups with ``shared_host_producer`` (id 56800572848),
buckets by ``WorkerExtension.update_weights`` of ``rlhf_utils`` (ids 35967582012 and 57386396095).
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MetaInitMode(TorchDispatchMode):
    """What is created empty has no storage yet; what is created with values (``ones``, ``full``) is real.

    A tensor without storage goes into nothing but random initialization; anything else raises, and the model is built anew.
    """

    _EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)
    _RANDOM = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self._EMPTY:
            return func(*args, **{**kwargs, "device": torch.device("meta")})
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):
            if func not in self._RANDOM:
                raise RuntimeError(f"a meta tensor in {func}")
            return args[0]
        return func(*args, **kwargs)


class Peer:
    """What ModelExpress hands on: parameters by name, one of each address; ``transformed``: after the source's walk."""

    def __init__(self, transformed=False):
        self.transformed = transformed
        self.published = {}

    def publish(self, model):
        seen = set()
        for name, parameter in model.named_parameters():
            if parameter.data_ptr() not in seen:
                seen.add(parameter.data_ptr())
                self.published[name] = parameter.data.clone()

    def receive(self, model):
        """Bytes of the same name and length."""
        for name, parameter in model.named_parameters():
            source = self.published.get(name)
            if source is not None and source.nbytes == parameter.nbytes:
                parameter.data.copy_(source)


Tensors = dict[str, dict[str, torch.Tensor]]
"""Attribute of the model to the tensors of that layer."""


def load(build, weights, peer=None):
    """``built_once`` of the model says that it was not built anew.

    ``weights``: a list is a stream of groups; nothing of it is loaded where the peer has published."""
    try:
        with MetaInitMode():
            model = build()
            _create_weights(model)
        model.built_once = True
        model._apply(lambda t: torch.full_like(t, 7, device="cpu") if t.is_meta else t)  # whatever the memory held
    except Exception:  # the host: "Fallback to regular model init"
        model = build()
        _create_weights(model)
        model.built_once = False
    receives = peer is not None and bool(peer.published)
    if peer is not None and receives:
        peer.receive(model)
    elif isinstance(weights, list):
        for group in weights:
            _load_weights(model, group, allow_partial_loading=True)
        _walk_process_weights_after_loading(model)
    else:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda item: getattr(model, item[0]).load_weights([item[1]]), weights.items()))
    if peer is not None and not receives and not peer.transformed:
        peer.publish(model)
    if peer is not None and receives and peer.transformed:
        for module in kept(model):
            if hasattr(module, "_weights_transformed"):
                module._weights_transformed = True
        walk(model, "cache_derived_state")
    else:
        walk(model, "post_load_weights")
    if peer is not None and not receives and peer.transformed:
        peer.publish(model)
    return model


def _load_weights(model, weights, *, allow_partial_loading):
    for name, tensors in weights.items():
        getattr(model, name).load_weights([tensors], allow_partial_loading=allow_partial_loading)


def _create_weights(model):
    """``__post_init__`` of the model: wrappers first, then what they hold."""
    for module in list(model.modules()):
        if hasattr(module, "create_weights"):
            module.create_weights()


def kept(model):
    """Not ``ConfigurableMoE``, which leaves its weights to its backend, nor layers of other pipeline ranks."""
    for module in model.modules():
        if not getattr(module, "_weights_removed", False):
            yield module


def walk(model, *hooks):
    for module in kept(model):
        for hook in hooks:
            if hasattr(module, hook):
                getattr(module, hook)()


def _walk_process_weights_after_loading(model):
    """Once per wrapper or backend, by the wrapper, which has no weights: neither is processed."""
    delegated = {id(module.backend) for module in model.modules() if hasattr(module, "backend")}
    for module in kept(model):
        if id(module) not in delegated and hasattr(module, "process_weights_after_loading"):
            module.process_weights_after_loading()


def update_weights(model, bucket):
    """``WorkerExtension.update_weights`` of RLHF: one bucket after the other, then None."""
    if not hasattr(model, "first_pre_reload_weights"):
        walk(model, "pre_reload_weights")
        model.first_pre_reload_weights = True
    if bucket is not None:
        _load_weights(model, bucket, allow_partial_loading=True)
        return
    walk(model, "process_weights_after_loading", "post_load_weights")
    del model.first_pre_reload_weights
