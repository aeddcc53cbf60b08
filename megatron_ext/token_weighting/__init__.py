"""Weight tokens in the loss by how much a long context helps to predict them (arXiv 2503.09202)."""

from megatron_ext.token_weighting.weigh import weigh

__all__ = ["weigh"]
