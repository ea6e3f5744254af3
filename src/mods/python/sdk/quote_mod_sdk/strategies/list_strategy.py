from thunder_mods.strategies.primitives import ListStrategy

__all__ = ["ListStrategy"]
