"""Description of an exception of a mod."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import Any, Dict

#: Maximum characters of an exception's message and traceback.
_MAX_MESSAGE_CHARS = 2000
_MAX_TRACEBACK_CHARS = 64 * 1024
#: Hint for a denied operation.
_SANDBOX_HINT = " (the mod runs in the sandbox of uploaded mods, which permits no network and no new processes)"
#: Hint for a missing module.
_INTERPRETER_HINT = " (mods run on Python %d.%d, %s; set THUNDER_PYTHON=PATH to use another one, such as bin/python of a virtual environment)" % (
    *sys.version_info[:2], sys.executable
)


def describe_exception(error: BaseException, sdk: str) -> Dict[str, str]:
    """Returns the message of an exception, and its traceback without the frames of the SDK, whose directory is `sdk`."""
    try:
        text = str(error).strip() or "no message"
        if isinstance(error, ModuleNotFoundError):
            text = text.splitlines()[0] + _INTERPRETER_HINT
        if isinstance(error, SyntaxError):
            text = "%s (%s, line %s)" % (error.msg, error.filename, error.lineno)
        if os.environ.get("THUNDER_SANDBOX") and _is_denied(error):
            text = text.splitlines()[0] + _SANDBOX_HINT
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(sdk):
            trace = trace.tb_next
        whole = "".join(traceback.format_exception(type(error), error, trace))
    except BaseException:  # str() of an exception can run code of the mod
        text, whole = "the text of the exception cannot be read", ""
    message = "%s: %s" % (type(error).__name__, text.splitlines()[0])
    # The last exception and its position are at the end.
    return {"message": message[:_MAX_MESSAGE_CHARS], "traceback": whole[-_MAX_TRACEBACK_CHARS:]}


def _is_denied(error: Any) -> bool:
    """Returns True if the system denied an operation. `URLError` has the error of the system in `reason`."""
    return any(getattr(cause, "errno", None) == errno.EPERM for cause in (error, getattr(error, "reason", None), error.__cause__))
