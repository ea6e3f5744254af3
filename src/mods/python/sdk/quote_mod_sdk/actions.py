from thunder import ActionBuilder, InvalidActionError, for_event  # noqa: F401
