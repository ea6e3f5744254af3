from thunder import Added, mod


@mod
def take_back(event, actions, tokenizer):
    """Takes the first eight tokens back once, and puts a word in their place."""
    if isinstance(event, Added) and event.step == 8:
        return actions.backtrack(8, tokenizer.encode("Instead"))
