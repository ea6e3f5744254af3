"""The conversation and the tools of the run that the mod is called for."""

import copy
import json

#: The run of the present call; set by the worker.
current = None


def _of(request_id, field):
    if current is None:
        if request_id is None:
            return []
        raise PermissionError("there is no run at this moment; ask within a call")
    if request_id is not None and request_id != current.request_id:
        raise PermissionError("the conversation of another request cannot be read")
    return copy.deepcopy(getattr(current, field)) or []


def get_conversation(request_id=None):
    """The messages of the present run as sent; [] for a raw completion."""
    return _of(request_id, "conversation")


def get_schemas(request_id=None):
    """The tools of the present run as sent; [] when there are none."""
    return _of(request_id, "tools")


def tool_call_pairs(messages=None):
    """Each tool call of the conversation with the text of its result: [(call, text or None), …]."""
    pairs, place = [], {}
    for message in get_conversation() if messages is None else messages:
        if not isinstance(message, dict):
            continue
        if message.get("role") == "assistant":
            for call in message.get("tool_calls") or []:
                if isinstance(call, dict) and isinstance(call.get("id"), str):
                    place[call["id"]] = len(pairs)
                    pairs.append((copy.deepcopy(call), None))
        elif message.get("role") == "tool" and message.get("tool_call_id") in place:
            index = place[message["tool_call_id"]]
            pairs[index] = (pairs[index][0], _text(message.get("content")))
    return pairs


def _text(content):
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part if isinstance(part, str) else part.get("text", "") for part in content if isinstance(part, (str, dict))]
        return "".join(parts) or None
    return json.dumps(content)
