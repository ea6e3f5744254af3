from thunder_mods.actions import InvalidActionError, validate_action

__all__ = ["InvalidActionError", "validate_action"]
