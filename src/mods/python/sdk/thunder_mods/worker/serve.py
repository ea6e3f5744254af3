"""Loads one mod and handles the server's frames, one at a time."""

from __future__ import annotations

import linecache
import os
import shutil
import sys
import threading
import time
import traceback
import types
from array import array
from typing import Any, Callable, Dict, List, Optional, Tuple

from .. import conversation, lifecycle, quote
from ..actions import (
    AdjustedLogits,
    AdjustedPrefill,
    Backtrack,
    EmitError,
    ForceOutput,
    ForceTokens,
    InvalidActionError,
    ModAction,
    Noop,
    ToolCalls,
    check_max_steps,
    check_nesting,
    validate_action,
)
from ..config import fill_defaults
from ..decorator import mod as decorate
from ..events import Added, ContextInfo, ForwardPass, HiddenStates, ModEvent, Prefilled, Sampled
from ..logits import Logits, flat, numpy
from ..tokenizer import Tokenizer
from .capture import Capture
from .channel import Channel, Memory
from .failure import describe_exception
from .score import call_scorer, find_scorer

#: Maximum of a field of a message that counts tokens.
_MAX_COUNT = 2**31 - 1

Header = Dict[str, Any]


class Run:
    """Properties of a run that do not change."""

    def __init__(self, header: Header, tokenizer: Tokenizer, declaration: Dict[str, Any]) -> None:
        self.request_id = header["request_id"]
        self.model = header["model"]
        self.conversation = header["conversation"]
        self.tools = header["tools"]
        self.images = header["images"]
        self.parameters = header["parameters"]
        self.seed = header["seed"]
        self.layers = header.get("layers")
        self.config = fill_defaults(header["config"], declaration["config"], declaration["schema"])
        self.tokenizer = tokenizer


class Worker:
    """The mod of this process, and the runs that use it."""

    def __init__(self, channel: Channel, memory: Memory, sdk: str) -> None:
        self.channel = channel
        self.memory = memory
        self.sdk = sdk
        self.capture = Capture(channel)
        self.module: Any = None
        self.handler: Any = None
        self.declaration: Dict[str, Any] = {"config": None, "schema": None}
        self.holdback = 0
        self.is_quote = False
        self.runs: Dict[int, Run] = {}
        self.tokenizers: Dict[int, Tokenizer] = {}
        # Threads of the mod may query, too. The lock keeps a query and its answer together, and delays the end of a call
        # until a query in progress is answered.
        self.query_lock = threading.Lock()

    def serve(self) -> None:
        """Handles frames until the server closes the channel."""
        handlers_by_kind: Dict[str, Callable[[Header, bytes], None]] = {"load": self.load, "run": self.begin, "call": self.call, "finished": self.finish, "score": self.score}
        while True:
            frame = self.channel.receive()
            if frame is None:
                return
            header, body = frame
            handlers_by_kind[header["kind"]](header, body)

    # -- loading ---------------------------------------------------------------------------------------------------

    def load(self, header: Header, body: bytes) -> None:
        """Imports the mod."""
        name = header["module"]
        self.capture.install(name)
        try:
            source = body.decode("utf-8")
            if any(word in source for word in ("logit", "logprob", "hidden_state")):
                numpy()  # its import takes longer than the deadline of a call
            self.module = self._execute(name, header["file"], source)
            if header["scorer"]:
                self.handler = find_scorer(self.module, header["file"])
                self.capture.end_call()
                self.channel.send({"kind": "loaded", "handlers": []})
                return
            # A mod may also import Quote's names within its function.
            self.is_quote = quote.is_loaded() or quote.is_imported_by(self.module)
            handlers = self._handlers(header["entrypoint"], header["file"])
        except BaseException as error:  # sys.exit() in a mod is an error of the mod
            self.capture.end_call()
            self.channel.send(dict(describe_exception(error, self.sdk), kind="failed"))
            return
        self.handler = handlers[0][1]
        declarations = []
        for attribute, function in handlers:
            is_imported = self._is_of_other_module(function)
            declaration = dict(function.__thunder_mod__, entrypoint=attribute, is_imported=is_imported)
            declaration["name"] = declaration["name"] or attribute
            declarations.append(declaration)
        self.declaration, self.holdback = declarations[0], declarations[0]["holdback"]
        self.capture.end_call()
        self.channel.send({"kind": "loaded", "handlers": declarations})

    @staticmethod
    def _execute(name: str, file: str, source: str) -> types.ModuleType:
        module = types.ModuleType(name)
        module.__file__ = file
        sys.modules[name] = module  # needed by dataclasses and inspect
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        # The `from __future__ import annotations` of this file must not apply to the mod.
        exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
        return module

    def _handlers(self, entrypoint: Optional[str], file: str) -> List[Tuple[str, Any]]:
        if entrypoint is not None:
            found = getattr(self.module, entrypoint, None)
            if not callable(found):
                known = [name for name, value in vars(self.module).items() if hasattr(value, "__thunder_mod__")]
                raise AttributeError(
                    "%s has no function '%s'; its mods are: %s" % (file, entrypoint, ", ".join(known) or "none")
                )
            if not hasattr(found, "__thunder_mod__"):
                found = decorate(quote.adapt_handler(found) if self.is_quote else found)
            return [(entrypoint, found)]
        found = []
        seen = set()
        for attribute, value in vars(self.module).items():
            if hasattr(value, "__thunder_mod__") and id(value) not in seen:
                seen.add(id(value))
                found.append((attribute, value))
        if not found:
            raise AttributeError(
                "%s has no mod; decorate a function(event, actions, tokenizer) with @mod (from thunder_mods import mod)" % file
            )
        return found

    def _is_of_other_module(self, value: Any) -> bool:
        """Returns True for a name of another module of the package."""
        own, other = self.module.__name__, getattr(value, "__module__", None) or ""
        if other == own or other.partition(".")[0] != own.partition(".")[0]:
            return False
        return other in sys.modules and any(value is defined for defined in vars(sys.modules[other]).values())

    # -- runs ------------------------------------------------------------------------------------------------------

    def begin(self, header: Header, _: bytes) -> None:
        """Registers a run for later calls."""
        vocabulary = header["vocabulary"]
        tokenizer = self.tokenizers.get(vocabulary["id"])
        if tokenizer is None:
            number = vocabulary["id"]
            tokenizer = Tokenizer(
                lambda request: self.query(dict(request, vocabulary=number)),
                vocabulary["size"],
                vocabulary["eos"],
                vocabulary["bos"],
                vocabulary["end_of_generation"],
            )
            self.tokenizers[number] = tokenizer
        self.runs[header["run"]] = Run(header, tokenizer, self.declaration)

    def finish(self, header: Header, _: bytes) -> None:
        """Removes a run that has ended."""
        run = self.runs.pop(header["run"], None)
        if run is None:
            self.reply(None, None, 0)
            return
        hook = getattr(self.module, "finished", None)
        if not callable(hook) or hasattr(hook, "__thunder_mod__"):
            hook = None

        def end_run(_: None) -> None:
            lifecycle.notify_finished(run.request_id)
            if hook is not None:
                hook(run.request_id)

        self._run_and_reply(run, end_run)

    def query(self, header: Header) -> Tuple[Header, bytes]:
        """Sends a query to the server and returns the answer."""
        with self.query_lock:
            if conversation.current is None:
                raise RuntimeError("the tokenizer can only query the server during a call")
            self.channel.send(dict(header, kind="query"))
            frame = self.channel.receive()
        if frame is None:
            os._exit(0)
        if frame[0].get("gone"):
            raise RuntimeError("the model of this tokenizer is no longer loaded")
        return frame

    # -- scores ----------------------------------------------------------------------------------------------------

    def score(self, header: Header, body: bytes) -> None:
        """Scores an answer."""
        try:
            answer: Header = {"kind": "scored", "score": call_scorer(self.handler, body.decode("utf-8"), header["cell"])}
        except BaseException as error:  # sys.exit() in a scorer is an error of the scorer
            answer = dict(describe_exception(error, self.sdk), kind="failed")
        self.capture.end_call()
        self.channel.send(answer)

    # -- calls -----------------------------------------------------------------------------------------------------

    def call(self, header: Header, _: bytes) -> None:
        """Calls the mod with one event."""
        run = self.runs[header["run"]]

        def handle(event: ModEvent) -> Any:
            try:
                return self.handler(event, run.tokenizer)
            finally:
                event.context_info._end_call()

        self._run_and_reply(run, handle, header)

    def _run_and_reply(self, run: Run, work: Callable[[Any], Any], header: Optional[Header] = None) -> None:
        """Runs `work` with the event of a call, or with None, and sends the reply."""
        conversation.current = run
        started_at = time.perf_counter_ns()
        event: Optional[ModEvent] = None
        try:
            if header is not None:
                event = self._event(header, run)
            action = work(event)
            elapsed = time.perf_counter_ns() - started_at
            if event is None:
                self.reply(None, None, elapsed)
            else:
                wire, body = self._encode_action(validate_action(event, action), event)
                self.reply(wire, None, elapsed, body, event)
        except BaseException as error:  # sys.exit() in a mod is an error of the mod
            self.reply(None, describe_exception(error, self.sdk), time.perf_counter_ns() - started_at, event=event)

    def _event(self, header: Header, run: Run) -> ModEvent:
        offset, count = header["tokens"]

        def read(last: int) -> List[int]:
            skip = max(0, count - last) if last else 0
            return self.memory.view(offset + 4 * skip, count - skip, "i").tolist()  # type: ignore[no-any-return]

        context = ContextInfo((), header["prompt_len"], read, header["evicted"], header["evictions_end"])
        kind, request_id = header["event"], run.request_id
        step = quote.quote_step(header["step"]) if self.is_quote else header["step"]
        event: ModEvent
        if kind == "ForwardPass":
            logits_offset, size = header["logits"]
            event = forward = ForwardPass(request_id, step, Logits(self.memory.view(logits_offset, size, "f")), context)
            if self.declaration["hidden_states"]:
                states = header.get("hidden_states")
                view = None if states is None else self.memory.view(*states, "f")
                forward._hidden_states = HiddenStates(self.declaration["hidden_states"], run.layers, view)
        elif kind == "Sampled":
            drawn = event = Sampled(request_id, step, header["token"], context)
            drawn._text, drawn.logprob = header["text"], header["logprob"]
        elif kind == "Added":
            event = Added(request_id, step, read(header["added"]) if header["added"] else [], header["forced"], context)
        else:
            prefilled = event = Prefilled(request_id, step, header["max_steps"], context)
            prefilled._sent_images = run.images
        event.max_steps = header["max_steps"]
        event.config, event.conversation, event.tools = run.config, run.conversation, run.tools
        event.parameters, event.seed, event.model, event._tokenizer = run.parameters, run.seed, run.model, run.tokenizer
        return event

    def _encode_action(self, action: ModAction, event: Any) -> Tuple[Optional[Header], bytes]:
        """Converts an action to (JSON, body)."""
        if isinstance(action, Noop):
            return None, b""
        if isinstance(action, AdjustedLogits):
            return self._encode_logits(action, event)
        fields: Header = {}
        if isinstance(action, Backtrack):
            # The maximum already removes all generated tokens.
            fields = {"n": min(action.n, _MAX_COUNT), "tokens": _ids(action.tokens or [])}
        elif isinstance(action, (ForceTokens, ForceOutput)):
            fields = {"tokens": _ids(action.tokens)}
        elif isinstance(action, AdjustedPrefill):
            # 0 keeps the limit, as in Quote.
            fields = {"tokens": _ids(action.tokens), "max_steps": check_max_steps(action.max_steps) or None}
        elif isinstance(action, ToolCalls):
            check_nesting(action.tool_calls)
            fields = {"tool_calls": action.tool_calls}
        elif isinstance(action, EmitError):
            fields = {"message": str(action.err_str), "is_quote": self.is_quote}
        kind = next(cls for cls in type(action).__mro__ if cls.__module__ == "thunder_mods.actions").__name__
        return dict(fields, type=kind), b""

    @staticmethod
    def _encode_logits(action: AdjustedLogits, event: ForwardPass) -> Tuple[Header, bytes]:
        fields: Header = {"type": "AdjustedLogits", "temperature": action.token_temp}
        sparse = action.set if action.set is not None else action.add
        if sparse is not None:
            fields["edit"] = "set" if action.set is not None else "add"
            tokens, values = array("i", _ids(sparse)), array("f", sparse.values())
            return fields, tokens.tobytes() + values.tobytes()
        view, given = event.logits._view, action.logits
        if given is event.logits or given is None:
            fields["edit"] = "memory" if event.logits.maybe_written else "keep"
            return fields, b""
        if isinstance(given, Logits):
            values = given._view
        else:
            values = flat(given.to_numpy() if hasattr(given, "to_numpy") else given)
        if len(values) != len(view):
            raise InvalidActionError(
                "adjust_logits takes %d logits, one per token of the vocabulary, got %d" % (len(view), len(values))
            )
        view[:] = memoryview(values).cast("B").cast("f")
        fields["edit"] = "memory"
        return fields, b""

    # -- replies ---------------------------------------------------------------------------------------------------

    def reply(
        self, action: Optional[Header], exception: Optional[Header], elapsed_ns: int, body: bytes = b"", event: Optional[ModEvent] = None
    ) -> None:
        """Sends the reply to a call."""
        held_back = None if event is None else event._held_back
        with self.query_lock:
            conversation.current = None
        self.capture.end_call()
        if action is None and exception is None and held_back is None:
            # The most frequent reply is built without the JSON encoder.
            self.channel.send_encoded(b'{"kind":"reply","action":null,"exception":null,"elapsed_ns":%d}' % elapsed_ns)
            return
        header: Header = {"kind": "reply", "action": action, "exception": exception, "elapsed_ns": elapsed_ns}
        if event is not None and held_back is not None:
            header["holdback"] = self.holdback if held_back < 0 else min(held_back, _MAX_COUNT)
            header["discard_from"] = event._discard_from
        self.channel.send(header, body)


def _ids(tokens: Any) -> List[int]:
    try:
        ids = [int(token) for token in tokens]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidActionError("an action takes token ids: %s" % error) from None
    for token in ids:
        if not -(2**31) <= token < 2**31:
            raise InvalidActionError("an action takes token ids, got %.40r" % (token,))
    return ids


def main(protocol: int, memory: int, worker_dir: str, sdk: str) -> None:
    """Handles frames until the server closes the channel. `worker_dir` is the directory of this process, `sdk` the SDK's."""
    worker = Worker(Channel(protocol), Memory(memory), sdk)
    status = 1
    try:
        worker.serve()
        status = 0
    except BaseException:
        # The server reports the last output of the process.
        os.write(2, traceback.format_exc().encode("utf-8", "replace"))
    finally:
        # The server may have been killed, so the worker removes its own directory.
        os.chdir("/")
        shutil.rmtree(worker_dir, ignore_errors=True)
        os._exit(status)
