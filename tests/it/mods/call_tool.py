from thunder import Sampled, mod


@mod
def call_tool(event, actions, tokenizer):
    """Ends every run with a tool call at its first token."""
    if isinstance(event, Sampled):
        return actions.tool_calls({"name": "get_weather", "arguments": {"city": "Oakford"}})
