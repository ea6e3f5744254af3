from thunder_mods.actions import InvalidActionError, validate_action  # noqa: F401
