from thunder import Added, mod


@mod
def replace_start(event, actions, tokenizer):
    """Replaces the first eight tokens with a word, once."""
    if isinstance(event, Added) and event.step == 8:
        return actions.backtrack(8, tokenizer.encode("Instead"))
