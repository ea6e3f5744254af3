from thunder_mods.actions import ActionBuilder, InvalidActionError, for_event

__all__ = ["ActionBuilder", "InvalidActionError", "for_event"]
