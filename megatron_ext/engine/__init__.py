"""The only room that imports Megatron-Core."""

import warnings

# before Megatron imports Transformer Engine: it sets how that chooses its attention
from megatron_ext.attention import te_thd as _te_thd  # noqa: F401

# said many times at import; the start-up lines of `train` say once what is used
for _text in ("Transformer Engine and Apex are not installed", "Apex is not installed", "full scope is deprecated"):
    warnings.filterwarnings("ignore", message=_text)
