"""Command lines over the package; installed as megatron_ext.tools, with a console command for each (commands.py)."""
