"""ckptool: look into, prove, reshard and export sharded training checkpoints.

It works without torch; ``ckptool.torch`` is the part that training loops import.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
