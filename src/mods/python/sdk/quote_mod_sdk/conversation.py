from thunder_mods.conversation import get_conversation, get_schemas, tool_call_pairs

__all__ = ["get_conversation", "get_schemas", "tool_call_pairs"]
