"""A mod as the payload that registers it with a server."""

import inspect
import textwrap


def serialize_mod(mod, *, name=None, description=None):
    """{language, module, entrypoint, source, name?, description?} for `POST /v1/mods`."""
    module = inspect.getmodule(mod)
    if module is None:
        raise ValueError("the mod must be defined in a module, whose source can be sent")
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        raise ValueError("the source of module %s cannot be read" % module.__name__) from None
    payload = {
        "language": "python",
        "module": module.__name__,
        "entrypoint": mod.__name__,
        "source": textwrap.dedent(source),
    }
    if name is not None:
        payload["name"] = name
    if description is not None:
        payload["description"] = description
    return payload
