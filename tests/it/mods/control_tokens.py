from thunder_mods import Added, ForwardPass, mod


@mod(events=[ForwardPass])
def force_control(event, actions, tokenizer):
    """Appends a control token, which has no text, at the second step."""
    if event.step == 2:
        return actions.force_tokens([tokenizer.convert_tokens_to_ids("<|im_start|>")])


@mod(events=[ForwardPass])
def force_end(event, actions, tokenizer):
    """Appends an end-of-generation token at the third step."""
    if event.step == 3:
        return actions.force_tokens([tokenizer.eos_token_id])


@mod(events=[Added])
def continue_after_end(event, actions, tokenizer):
    """Continues after every end-of-generation token."""
    if event.context_info.tokens[-1] in tokenizer.end_of_generation:
        return actions.force_tokens(tokenizer.encode(" and")[:1])


@mod(events=[Added])
def remove_four(event, actions, tokenizer):
    """Removes four tokens at the sixth step."""
    if event.step == 6:
        return actions.backtrack(4)
