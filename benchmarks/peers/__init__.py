"""This project beside others on the same work in one run; docs/comparison.md has the results.

Run from the repository's root: python -m benchmarks.peers.plans --magi-attention DIR, and so on. Each takes the paths
of checkouts; nothing of theirs is kept here.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the other benchmarks, which are scripts, import each other so
