from thunder_mods import Added, mod


@mod(events=[Added])
def loop_forever(event, actions, tokenizer):
    """Removes every token again."""
    return actions.backtrack(1)
