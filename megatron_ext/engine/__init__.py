"""The only room that imports Megatron-Core."""

import warnings

# said many times at import; the start-up lines of `train` say once what is used
for _text in ("Transformer Engine and Apex are not installed", "Apex is not installed", "full scope is deprecated"):
    warnings.filterwarnings("ignore", message=_text)
