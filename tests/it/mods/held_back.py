from thunder import Added, ForwardPass, mod, tool_call


@mod(events=[Added], holdback=50)
def block(event, actions, tokenizer):
    """Ends every run with an error after its fourth token. No text was sent before."""
    if event.step == 4:
        return actions.emit_error("blocked by policy")


@mod(events=[Added], holdback=50)
def convert_call(event, actions, tokenizer):
    """Ends every run with a message that has a tool call after its fourth token. No text was sent before."""
    if event.step == 4:
        return actions.tool_calls({"role": "assistant", "tool_calls": [tool_call("find", {"city": "Oakford"})]})


@mod(events=[ForwardPass], holdback=1)
def discard_from_third(event, actions, tokenizer):
    """Discards the tokens after the second, of which it knows only before each draw."""
    count = len(event.context_info.tokens) - event.context_info.prompt_len - 2
    if count > 0:
        event.hold_back(count, discard=True)
