from thunder import Prefilled, mod


@mod
def refuse(event, actions, tokenizer):
    """Ends every run with an error before its first token."""
    if isinstance(event, Prefilled):
        return actions.emit_error("not today")


@mod
def refuse_late(event, actions, tokenizer):
    """Ends every run with an error after its tenth token."""
    if event.step == 10:
        return actions.emit_error("enough")
