"""Print what a run has here: versions, devices, attention backends, optional packages.

python tools/environment.py [--config run.yaml --bf16 --flag value ...]

All flags are the trainer's. The run's own log starts with the same lines.
"""

import sys

from megatron_ext.cli import command
from megatron_ext.config.arguments import parse


@command
def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    config = parse(argv)
    from megatron_ext.engine import platform  # importing Megatron takes seconds
    from megatron_ext.engine.environment import look

    environment = look(config, platform.find(config.parallel.device))
    print("\n".join(environment.summary()))
    missing = ", ".join(name for name, version in environment.versions.items() if version is None)
    print(f"not installed: {missing or 'nothing'}")
    platform.choose(config.parallel.device)  # refuses what a run would refuse
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
