from thunder_mods.actions import ActionBuilder, InvalidActionError, for_event, validate_action  # noqa: F401
from thunder_mods.decorator import ModCallable, create_mod, mod  # noqa: F401
