"""docker/missing.py: an image's packages stay, the others come from the lock with their checksums."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = """# comment
absl-py==2.5.1 ; sys_platform == 'linux' \\
    --hash=sha256:11
Typing_Extensions==4.1 \\
    --hash=sha256:22 \\
    --hash=sha256:33
zarr==3.1.3 \\
    --hash=sha256:44
"""


def test_only_what_is_missing_is_listed() -> None:
    missing = runpy.run_path(str(ROOT / "docker" / "missing.py"))["missing"]
    left = missing(LOCK, {"typing-extensions", "torch"})
    assert left == LOCK.replace("# comment\n", "").replace(LOCK[LOCK.index("Typing") : LOCK.index("zarr")], "")
    assert missing(LOCK, {"absl-py", "typing-extensions", "zarr"}) == ""
