from thunder_mods.strategies.primitives import ListStrategy  # noqa: F401
