"""Comparisons with other projects on the same work; docs/comparison.md has the results.

Run from the repository's root: python -m benchmarks.peers.plans --magi-attention DIR, and so on. Each takes the paths
of checkouts; none of their code is included here.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the other benchmarks are scripts that import each other this way
