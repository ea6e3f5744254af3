from thunder import serialize_mod  # noqa: F401
