from trtllm_b12x.engines.trtllm.embedded import communication
from trtllm_b12x.engines.trtllm.embedded.communication import all_reduce

__all__ = ["AllGatherReduceScatter", "CommunicationFactory", "all_reduce"]


class AllGatherReduceScatter(communication.AllGatherReduceScatter):
    """With the arguments that the scheduler passes to every strategy."""

    def dispatch(self, *, use_dp_padding=None, **arguments):
        return super().dispatch(**arguments)

    def combine(self, final_hidden_states, all_rank_max_num_tokens=None):
        return super().combine(final_hidden_states)

    def destroy(self):
        pass


class CommunicationFactory:
    @staticmethod
    def create_strategy(model_config, **kwargs):
        mapping = model_config.mapping
        return AllGatherReduceScatter(mapping.tp_rank) if mapping.enable_attention_dp and mapping.tp_size > 1 else None
