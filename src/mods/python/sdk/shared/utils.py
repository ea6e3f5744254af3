from thunder import InvalidActionError, validate_action  # noqa: F401
