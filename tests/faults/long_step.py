"""The trainer with a third step of minutes, all inside a C function, which no signal interrupts."""

import hashlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_ext.run.trainer import Trainer
from pretrain_skyladder import main

launch = Trainer.launch


def launch_for_minutes(self: Trainer, *args: Any) -> None:
    if self.step == 2:
        print("the long step begins", file=sys.stderr, flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
    launch(self, *args)


if __name__ == "__main__":
    Trainer.launch = launch_for_minutes  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
