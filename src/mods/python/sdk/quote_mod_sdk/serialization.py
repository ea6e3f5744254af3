from thunder_mods.serialization import serialize_mod

__all__ = ["serialize_mod"]
