from thunder_mods.serialization import serialize_mod  # noqa: F401
