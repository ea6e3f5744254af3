from thunder_mods.actions import ActionBuilder, InvalidActionError, for_event  # noqa: F401
