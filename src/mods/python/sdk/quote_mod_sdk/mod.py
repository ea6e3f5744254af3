from thunder_mods.actions import ActionBuilder, InvalidActionError, for_event, validate_action
from thunder_mods.decorator import ModCallable, create_mod, mod

__all__ = ["ActionBuilder", "InvalidActionError", "ModCallable", "create_mod", "for_event", "mod", "validate_action"]
