"""Purpose of this mod, in one sentence."""

from thunder_mods import Added, mod


@mod(events=[Added], config={"ending": "!", "instead": "."}, holdback=8)
def mod_name(event, actions, tokenizer):
    """Ends sentences calmly."""
    ending = event.config["ending"]
    if event.forced or not ending or not event.text.endswith(ending):
        return None
    text = event.text[: -len(ending)] + event.config["instead"]
    return actions.backtrack(len(event.added_tokens), tokenizer.encode(text))
