from thunder import get_conversation, get_schemas, tool_call_pairs  # noqa: F401
