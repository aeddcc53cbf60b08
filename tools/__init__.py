"""Command-line tools of the package; installed as megatron_ext.tools, subcommands of megatron-ext (cli.py)."""
