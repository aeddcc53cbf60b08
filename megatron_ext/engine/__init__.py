"""The only room that imports Megatron-Core."""

import warnings

# said four times at import; the start-up line of `train` says once which layers are used
warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
