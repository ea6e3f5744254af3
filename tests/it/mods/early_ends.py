from thunder_mods import Added, Prefilled, mod, tool_call


@mod(events=[Prefilled])
def shorten(event, actions, tokenizer):
    """Limits every answer to three tokens."""
    return actions.adjust_prefill(event.context_info.prompt, max_tokens=3)


@mod(events=[Prefilled])
def text_as_prompt(event, actions, tokenizer):
    """Fails, because a prompt must be token ids."""
    return actions.adjust_prefill("You are nice. " + event.prompt_text)


@mod(events=[Added])
def call_tool_late(event, actions, tokenizer):
    """Ends every run with a tool call after three tokens, of which the client has received two."""
    if event.step == 3:
        return actions.tool_calls(tool_call("find", {"city": "Oakford"}))


@mod(events=[Added], holdback=1)
def fail_late(event, actions, tokenizer):
    """Ends every run with an error after three tokens, of which the client has received one."""
    if event.step == 3:
        return actions.emit_error("too late")
