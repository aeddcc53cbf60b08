"""Weight tokens in the loss by how much a long context helps to predict them (arXiv 2503.09202)."""

from megatron_ext.token_weighting.postprocess import Post
from megatron_ext.token_weighting.scores import Score
from megatron_ext.token_weighting.weigh import weigh, weigh_and_score

__all__ = ["Post", "Score", "weigh", "weigh_and_score"]
