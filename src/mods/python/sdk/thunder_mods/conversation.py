"""The conversation and the tools of the run that the mod is called for, and tool calls in OpenAI's shape."""

from __future__ import annotations

import copy
import json
import uuid
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

Message = Dict[str, Any]

#: The run of the present call; set by the worker.
current: Any = None


def _of(request_id: Optional[str], field: str) -> Any:
    if current is None:
        if request_id is None:
            return None
        raise PermissionError("there is no run at this moment; ask within a call")
    if request_id is not None and request_id != current.request_id:
        raise PermissionError("the conversation of another request cannot be read")
    return copy.deepcopy(getattr(current, field))


def get_conversation(request_id: Optional[str] = None) -> List[Message]:
    """The messages of the present run as sent, a copy; [] for a raw completion.

    Raises PermissionError for the id of another run."""
    return _of(request_id, "conversation") or []


def get_schemas(request_id: Optional[str] = None) -> List[Dict[str, Any]]:
    """The schemas of the present run, a copy: first that of `response_format` (its `json_schema.schema`, or the whole
    object where it has none), then the tools as sent; [] when there are neither."""
    form = ((_of(request_id, "parameters") or {}).get("request") or {}).get("response_format")
    if isinstance(form, dict) and isinstance(form.get("json_schema"), dict):
        form = form["json_schema"].get("schema")
    return ([form] if form else []) + (_of(request_id, "tools") or [])


def tool_call_pairs(messages: Optional[Sequence[Message]] = None) -> List[Tuple[Dict[str, Any], Optional[str]]]:
    """Each tool call of the conversation with the text of its result: [(call, text or None), …]."""
    pairs: List[Tuple[Dict[str, Any], Optional[str]]] = []
    place: Dict[str, int] = {}
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
            pairs[index] = (pairs[index][0], text_of(message))
    return pairs


def tool_call(name: str, arguments: Union[Dict[str, Any], str, None] = None, id: Optional[str] = None) -> Dict[str, Any]:
    """A tool call in OpenAI's shape, for `actions.tool_calls`. `arguments` is an object, or JSON text of one; without
    an `id` it gets a new one."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {
        "id": "call_" + uuid.uuid4().hex[:24] if id is None else id,
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


def last_message(role: Optional[str] = None, messages: Optional[Sequence[Message]] = None) -> Optional[Message]:
    """The last message, or the last one of a role ("user", "assistant", "tool", "system"); None without one."""
    for message in reversed(get_conversation() if messages is None else messages):
        if isinstance(message, dict) and role in (None, message.get("role")):
            return message
    return None


def text_of(message: Optional[Message]) -> Optional[str]:
    """The text of a message's content, which may be in several parts; None where it has none."""
    content = message.get("content") if isinstance(message, dict) else None
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part if isinstance(part, str) else part.get("text", "") for part in content if isinstance(part, (str, dict))]
        return "".join(map(str, parts)) or None
    return json.dumps(content)
