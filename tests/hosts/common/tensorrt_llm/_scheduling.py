# SPDX-License-Identifier: Apache-2.0
"""The order of a call that all generations have in common: chunks, routing, communication, sum over the ranks."""

import torch

from tensorrt_llm._torch.utils import Fp4QuantizedTensor


def split_chunk(tokens, chunks):
    quotient, remainder = divmod(tokens, chunks)
    return [quotient + 1] * remainder + [quotient] * (chunks - remainder)


class Scheduler:
    """Runs the calls of a layer, ``moe``, on its ``backend``. A generation says in ``run`` how that is called."""

    def __init__(self, moe, backend):
        self.moe, self.backend = moe, backend

    def forward(
        self, x, router_logits, *, output_dtype=None, all_rank_num_tokens=None, use_dp_padding=None, input_ids=None, **call
    ):
        moe = self.moe
        if not isinstance(x, Fp4QuantizedTensor):
            output_dtype = x.dtype
        assert output_dtype is not None
        counts = all_rank_num_tokens if all_rank_num_tokens is not None else [x.shape[0]]
        padded = [max(counts)] * len(counts) if use_dp_padding else counts
        call |= {"output_dtype": output_dtype, "use_dp_padding": use_dp_padding}
        num_chunks = -(-self.rows(padded) // moe.moe_max_num_tokens)
        if num_chunks == 1:
            outputs = self.forward_chunk(x, router_logits, input_ids, padded, **call)
        else:
            outputs = self._forward_multiple_chunks(x, router_logits, input_ids, padded, num_chunks, **call)
        if moe.use_dp and moe.parallel_size > 1:
            outputs = outputs[: counts[moe.mapping.tp_rank]]
        return outputs

    def rows(self, counts):
        """Of all ranks, by which chunks are counted."""
        return sum(counts)

    def _forward_multiple_chunks(self, x, router_logits, input_ids, counts, num_chunks, **call):
        moe = self.moe
        sizes, of_chunk = split_chunk(x.shape[0], num_chunks), [None] * num_chunks
        if moe.use_dp:
            of_rank = [split_chunk(count, num_chunks) for count in counts]
            sizes, of_chunk = of_rank[moe.mapping.tp_rank], [list(chunk) for chunk in zip(*of_rank, strict=True)]
        tokens = input_ids.split(sizes) if input_ids is not None else [None] * num_chunks
        chunks = list(zip(x.split(sizes), router_logits.split(sizes), tokens, of_chunk, strict=True))
        outputs = (self.forward_chunk(*self.filled(chunk, chunks[0]), **call) for chunk in chunks)
        return torch.cat([output[:size] for output, size in zip(outputs, sizes, strict=True)])

    def separates(self):
        """Whether a call is routed before its backend gets it."""
        return self.backend._supports_load_balancer()

    def filled(self, chunk, first):
        """What is sent instead of a chunk in which this rank has no tokens."""
        return chunk

    def forward_chunk(self, x, router_logits, input_ids, counts, *, output_dtype, use_dp_padding, **call):
        moe, backend = self.moe, self.backend
        ids = scales = None
        if self.separates():
            ids, scales = self.route(router_logits, input_ids)
            ids = ids.to(torch.int32)
            self.check(scales)
            if moe.apply_router_weight_on_input:
                x, scales = x * scales.to(x.dtype), None
        post_quant, x_sf = moe.comm is not None and moe.comm.supports_post_quant_dispatch(), None
        if post_quant:
            x, x_sf = backend.quantize_input(x)
        if moe.comm is not None:
            x, x_sf, ids, scales = moe.comm.dispatch(
                hidden_states=x,
                hidden_states_sf=x_sf,
                token_selected_slots=ids,
                token_final_scales=scales,
                all_rank_num_tokens=counts,
                use_dp_padding=use_dp_padding,
            )
        if not post_quant:
            x, x_sf = backend.quantize_input(x, post_quant_comm=False)
        arguments = {"x": x, "x_sf": x_sf, "token_selected_experts": ids, "token_final_scales": scales}
        call |= {"router_logits": router_logits, "swizzled": not post_quant, "output_dtype": output_dtype}
        result = self.run(arguments, counts, **call)
        if moe.comm is not None:
            return moe.comm.combine(result, all_rank_max_num_tokens=max(counts))
        return moe.all_reduce(result) if moe.parallel_size > 1 and moe.reduce_results else result


class KeywordScheduler(Scheduler):
    """Calls ``run_moe`` by keywords, as before C1."""

    def route(self, router_logits, input_ids):
        return self.moe.routing_method.apply(router_logits)

    def check(self, scales):
        assert scales.dtype == torch.float32

    def run(self, arguments, counts, router_logits, **call):
        return self.backend.run_moe(**arguments, **self.backend_kwargs(counts, **call))

    def backend_kwargs(self, counts, *, swizzled, output_dtype, **call):
        moe = self.moe
        kwargs = {"is_sf_swizzled": swizzled, "output_dtype": output_dtype, "moe_output": None}
        if moe.enable_alltoall:
            kwargs |= {"tuner_num_tokens": sum(counts), "tuner_top_k": moe.routing_method.experts_per_token}
        return {**kwargs, "enable_alltoall": moe.enable_alltoall}
