"""Mods written for the Quote SDK."""

import json
import time

from quote_mod_sdk import Added, ForwardPass, Prefilled, get_schemas, mod


@mod
def quote_greets(event, actions, tokenizer):
    """Begins every answer with a greeting, as in the README of Quote's engine."""
    if isinstance(event, ForwardPass):
        if event.step == 0:
            return actions.force_tokens(tokenizer.encode("Greetings! ", add_special_tokens=False))
    return actions.noop()


@mod
def quote_schemas(event, actions, tokenizer):
    """Replaces the answer with the schemas of the request."""
    if isinstance(event, Prefilled):
        return actions.force_output(tokenizer.encode(json.dumps(get_schemas()), add_special_tokens=False))
    return actions.noop()


@mod
def quote_refuse(event, actions, tokenizer):
    """Ends every run with an error."""
    return actions.emit_error("not today")


@mod
def quote_late_call(event, actions, tokenizer):
    """Ends every run with a tool call after some text."""
    if isinstance(event, ForwardPass) and event.step == 0:
        return actions.force_tokens(tokenizer.encode("Let me look.", add_special_tokens=False))
    if isinstance(event, Added) and event.step == 1:
        return actions.tool_calls({"name": "get_weather", "arguments": {"city": "Oakford"}})
    return actions.noop()


@mod
def quote_slow(event, actions, tokenizer):
    """Sleeps at every token."""
    if isinstance(event, Added):
        time.sleep(0.02)
    return actions.noop()
