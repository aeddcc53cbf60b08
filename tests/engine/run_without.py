"""`pretrain_skyladder.py` without one patch: WITHOUT names an entry of platform.PATCHES, or `optimizer`."""

import os
import sys
from pathlib import Path

from megatron_ext.engine import compat, platform

if __name__ == "__main__":
    left_out = os.environ["WITHOUT"]
    if left_out == "optimizer":
        compat.install_optimizer = lambda: None
    else:
        del platform.PATCHES[left_out]
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from pretrain_skyladder import main

    sys.exit(main(sys.argv[1:]))
