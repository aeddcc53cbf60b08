"""flash-attn 2.8.1 on a CPU: its exact variable-length attention, with the same signature."""

from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func

__version__ = "2.8.1"
__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
