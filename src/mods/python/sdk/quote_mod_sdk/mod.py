from thunder import ActionBuilder, InvalidActionError, ModCallable, create_mod, for_event, mod, validate_action  # noqa: F401
