"""Simulation of the engine without a model: order of events, and effects of actions."""

from __future__ import annotations

import math
import random
from array import array
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from .. import conversation as _conversation
from .. import lifecycle, quote
from ..actions import AdjustedLogits, AdjustedPrefill, Backtrack, EmitError, ForceOutput, ForceTokens
from ..actions import InvalidActionError, ModAction, Noop, ToolCalls, validate_action
from ..events import Added, ContextInfo, ForwardPass, HiddenStates, ModEvent, Prefilled, Sampled
from ..logits import Logits, flat
from .action_check import action_error, tool_calls_of
from .active_mod import ActiveMod
from .answer import Answer
from .capture import captured
from .models import to_model
from .result import Call, Event, Result
from .vocabulary import WordTokenizer

#: (token ids so far, layer) -> hidden state of the last token after the layer.
HiddenStatesFunction = Callable[[List[int], int], Sequence[float]]
#: Kind of the last event, and the action that takes effect; None continues with the next step.
_Outcome = Tuple[str, Optional[ModAction]]


class Engine:
    """Model and tokenizer for running mods.

    model: a text, {end of a question: answer}, a function (token ids) -> logits, or a model of this package.
    tokenizer: by default a `WordTokenizer`. context: maximum tokens of a sequence.
    """

    def __init__(self, model: Any = None, tokenizer: Any = None, context: int = 4096) -> None:
        self.model = to_model(model)
        self.tokenizer = WordTokenizer() if tokenizer is None else tokenizer
        self.context = context

    def run(
        self,
        mods: Any,
        prompt: Any = "Once upon a time",
        *,
        max_tokens: int = 64,
        max_steps: Optional[int] = None,
        config: Optional[Dict[str, Any]] = None,
        conversation: Optional[List[Dict[str, Any]]] = None,
        tools: Optional[List[Dict[str, Any]]] = None,
        response_format: Optional[Dict[str, Any]] = None,
        parameters: Optional[Dict[str, Any]] = None,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        request_id: str = "test",
        hidden_states: Optional[HiddenStatesFunction] = None,
    ) -> Result:
        """Runs one mod, or a list of mods in order. An entry (mod, configuration) has its own configuration; `config` is
        the configuration of all others.

        max_tokens: maximum tokens of the answer. max_steps: maximum forward passes, by default 4 * max_tokens + 256, also of
        a larger max_tokens that a mod sets.
        temperature: temperature of draws; 0 takes the most probable token. hidden_states: function (token ids, layer) ->
        values, for mods that declare `hidden_states`."""
        mod_list = list(mods) if isinstance(mods, list) else [mods]
        simulation = _Run(self, mod_list, config or {}, request_id, max_tokens, max_steps, stop, ignore_eos, temperature, seed)
        simulation.hidden_states = hidden_states
        simulation.conversation, simulation.tools, simulation.parameters = conversation, tools, dict(parameters or {})
        if response_format is not None:
            simulation.parameters["request"] = {"response_format": response_format}
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not tokens:
            raise ValueError("the prompt must have at least one token")
        return simulation.execute(tokens)


def run(mods: Any, prompt: Any = "Once upon a time", *, model: Any = None, tokenizer: Any = None, **options: Any) -> Result:
    """Runs mods with a new engine; `options` are those of `Engine.run`."""
    return Engine(model, tokenizer).run(mods, prompt, **options)


class _Run:
    def __init__(
        self,
        engine: Engine,
        mods: List[Any],
        config: Dict[str, Any],
        request_id: str,
        max_tokens: int,
        max_steps: Optional[int],
        stop: Sequence[str],
        ignore_eos: bool,
        temperature: float,
        seed: int,
    ) -> None:
        self.model, self.tokenizer, self.context = engine.model, engine.tokenizer, engine.context
        self.mods = [ActiveMod(function, config) for function in mods]
        self.max_steps_for: Callable[[int], int] = lambda tokens: 4 * tokens + 256 if max_steps is None else max_steps
        self.request_id, self.max_tokens, self.max_steps = request_id, max_tokens, self.max_steps_for(max_tokens)
        self.temperature, self.seed, self.draws = temperature, seed, random.Random(seed)
        self.hidden_states: Optional[HiddenStatesFunction] = None
        self.conversation: Any = None
        self.tools: Any = None
        self.parameters: Dict[str, Any] = {}
        self.ends = frozenset() if ignore_eos else frozenset(self.tokenizer.end_of_generation)
        hidden = self.ends.union(self.tokenizer.all_special_ids)
        self.answer = Answer(self.tokenizer, stop, hidden.__contains__)
        self.sequence: List[int] = []
        self.prompt_len = 0
        self.step = 0
        self.events: List[Event] = []
        self.calls: List[Call] = []
        self.logits: Any = None
        self.draw_temperature: Optional[float] = None
        self.drawn: Optional[int] = None
        #: Number of the answer's first tokens that an action at the end of the run keeps; tokens that were sent are kept, too.
        self.discard_from: Optional[int] = None
        self.end: Optional[Tuple[str, Optional[str], Optional[List[Any]]]] = None

    def execute(self, prompt: List[int]) -> Result:
        self.sequence, self.prompt_len = list(prompt), len(prompt)
        kind, winner = "Prefilled", self._dispatch("Prefilled", 0, prompt)
        while self.end is None:
            kind, winner = self._step() if winner is None else self._apply(kind, winner)
        self.answer.end(self._kept())
        lifecycle.notify_finished(self.request_id)
        for active in self.mods:
            if active.finished is not None:
                active.finished(self.request_id)
        reason, message, calls = self.end
        generated, prompt_tokens = self._generated(), self.sequence[: self.prompt_len]
        return Result(self.answer.text(self._kept()), prompt_tokens, generated, reason, message, calls, self.events, self.calls, self.answer.sent)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _step(self) -> _Outcome:
        """Runs a step: forward pass, draw, append."""
        if self.step >= self.max_steps:
            return self._finish_at_last_step()
        self.step += 1
        self.draw_temperature = None
        self.logits = array("f", self.model.logits(list(self.sequence), self.prompt_len, self.tokenizer))
        winner = self._dispatch("ForwardPass", self.step, [])
        if winner is not None:
            return "ForwardPass", winner
        self.drawn = self._draw()
        if self.drawn is None:
            return self._finish("error", "no token can be drawn: mods leave no token with a probability above 0")
        winner = self._dispatch("Sampled", self.step, [self.drawn])
        if winner is not None:
            return "Sampled", winner
        token, self.drawn = self.drawn, None
        return self._append([token], False, self.step)

    def _append(self, tokens: List[int], forced: bool, step: int) -> _Outcome:
        """Appends tokens, dispatches the Added event, and checks the end of the run."""
        self.sequence.extend(tokens)
        self.step = max(self.step, step)
        winner = self._dispatch("Added", step, tokens, forced)
        if winner is None or isinstance(winner, ForceTokens):
            self._send()
        if winner is not None:
            return "Added", winner
        if self.sequence[-1] in self.ends or self.answer.stopped(self._kept()):
            self._finish("stop")
        elif len(self._generated()) >= self.max_tokens:
            self._finish("length")
        elif len(self.sequence) >= self.context:
            self._finish("length", "the context of %d tokens is full" % self.context)
        return "Added", None

    def _apply(self, kind: str, action: ModAction) -> _Outcome:
        """Applies the action that takes effect at an event."""
        step = self.step + 1 if kind == "Added" or self.step == 0 else self.step
        self.drawn, removes_draw = None, kind == "Sampled"
        if isinstance(action, ForceTokens):
            return self._force(action.tokens, step)
        if isinstance(action, Backtrack):
            removed = min(action.n - removes_draw, len(self._generated()))
            if removed > 0:
                self._remove(removed)
            if action.tokens:
                return self._force(action.tokens, step)
        elif isinstance(action, ForceOutput):
            self._remove(len(self._generated()))
            tokens = self._truncated_at_end(action.tokens)
            self.sequence.extend(tokens)
            if tokens:
                self._record("Added", step, tokens, True)
            self._finish("stop")
        elif isinstance(action, ToolCalls):
            self.answer.retract([])
            self.discard_from = 0
            self._finish("tool_calls", None, tool_calls_of(action.tool_calls))
        elif isinstance(action, EmitError):
            self.discard_from = 0
            self._finish("error", str(action.err_str))
        return kind, None

    def _force(self, tokens: Sequence[int], step: int) -> _Outcome:
        if step > self.max_steps:
            return self._finish_at_last_step()
        forced = self._truncated_at_end(tokens)
        room = min(self.max_tokens - len(self._generated()), self.context - len(self.sequence))
        ends = bool(forced) and forced[-1] in self.ends
        if len(forced) - ends > room:
            forced = forced[: max(0, room)]
        elif len(self.sequence) + len(forced) > self.context:
            forced.pop()
        return self._append(forced, True, step) if forced else self._finish("length")

    def _remove(self, count: int) -> None:
        del self.sequence[len(self.sequence) - count :]
        generated = self._generated()
        self.answer.retract(generated)
        for active in self.mods:
            active.retracted(len(generated))

    def _finish(self, reason: str, message: Optional[str] = None, calls: Optional[List[Any]] = None) -> _Outcome:
        self.end = (reason, message, calls)
        return "", None

    def _finish_at_last_step(self) -> _Outcome:
        return self._finish("length", "the limit of %d steps was reached; a mod may backtrack endlessly" % self.max_steps)

    def _draw(self) -> Optional[int]:
        highest = max(self.logits)
        if highest == -math.inf:
            return None
        temperature = self.temperature if self.draw_temperature is None else self.draw_temperature
        if temperature == 0:
            return int(self.logits.index(highest))
        weights = [math.exp((logit - highest) / temperature) for logit in self.logits]
        return self.draws.choices(range(len(weights)), weights)[0]

    def _send(self) -> None:
        generated = self._generated()
        discarded = len(generated) - len(self._kept())
        self.answer.send(generated, max([discarded, *(active.holdback for active in self.mods)]))

    def _generated(self) -> List[int]:
        return self.sequence[self.prompt_len :]

    def _kept(self) -> List[int]:
        """Returns the generated tokens that are part of the answer if the run ends now."""
        generated = self._generated()
        announced = (self.discard_from, *(active.discard_from for active in self.mods))
        discarded = [first for first in announced if first is not None]
        return generated[: max(min(discarded), self.answer.sent_tokens(generated))] if discarded else generated

    def _truncated_at_end(self, tokens: Sequence[int]) -> List[int]:
        end = next((index for index, token in enumerate(tokens) if token in self.ends), len(tokens))
        return list(tokens[: end + 1])

    # -- events ------------------------------------------------------------------------------------------------------

    def _record(self, kind: str, step: int, tokens: Sequence[int], forced: bool = False) -> Event:
        position = 0 if kind == "Prefilled" else len(self.sequence) - (len(tokens) if kind == "Added" else 0)
        event = Event(kind, len(self.events), step, position, list(tokens), self.tokenizer.decode(tokens), forced)
        self.events.append(event)
        return event

    def _states(self, active: ActiveMod) -> HiddenStates:
        """Returns the hidden states of the layers that the mod declares."""
        function = self.hidden_states
        if function is None or not active.layers:
            return HiddenStates(active.layers)
        states = [flat(function(list(self.sequence), layer)) for layer in active.layers]
        if len({len(state) for state in states}) > 1:
            raise ValueError("hidden states of all layers must have the same length")
        joined = array("f", [value for state in states for value in state])
        return HiddenStates(active.layers, view=memoryview(joined))

    def _dispatch(self, kind: str, step: int, tokens: Sequence[int], forced: bool = False) -> Optional[ModAction]:
        """Dispatches an event to the mods. Returns the first action that does more than edit the prompt or the logits, if any."""
        event = self._record(kind, step, tokens, forced)
        winner: Optional[ModAction] = None
        for active in self.mods:
            if kind not in active.handles:
                continue
            call = self._call(active, event, winner is not None)
            self.calls.append(call)
            if isinstance(call.action, AdjustedPrefill):
                self.sequence, self.prompt_len = list(call.action.tokens), len(call.action.tokens)
                self.max_tokens = call.action.max_steps or self.max_tokens
                self.max_steps = max(self.max_steps, self.max_steps_for(self.max_tokens))
            elif isinstance(call.action, AdjustedLogits):
                if call.action.token_temp is not None:
                    self.draw_temperature = call.action.token_temp
                call.logits = list(self.logits)
            elif not isinstance(call.action, Noop) and winner is None:
                winner = call.action
        return winner

    def _call(self, active: ActiveMod, record: Event, has_winner: bool) -> Call:
        call = Call(active.name, record, Noop())
        before = array("f", self.logits) if self.logits is not None else None
        mod_event = self._mod_event(record, active)
        _conversation.current = _CurrentRun(self)
        try:
            with captured(call.logs, active.call.__module__):
                action = validate_action(mod_event, active.call(mod_event, self.tokenizer))
            error_message = action_error(action, len(self.tokenizer), self.context)
            if error_message is not None:
                raise InvalidActionError("%s: %s" % (record.kind, error_message))
            self._apply_to_logits(mod_event, action, before)
            call.action = action
        except Exception as error:
            call.exception = error
            self._apply_to_logits(mod_event, Noop(), before)
        finally:
            _conversation.current = None
        if mod_event._held_back is not None:
            active.holdback = active.static_holdback if mod_event._held_back < 0 else mod_event._held_back
        if mod_event._held_back is not None or (record.kind == "Added" and call.exception is None):
            active.discard_from = mod_event._discard_from
        call.superseded = has_winner and not isinstance(call.action, (Noop, AdjustedLogits, AdjustedPrefill))
        if isinstance(call.action, Backtrack):
            requested, available = call.action.n - (record.kind == "Sampled"), len(self._generated())
            call.removed, call.clamped = min(requested, available), requested > available
        return call

    def _mod_event(self, record: Event, active: ActiveMod) -> ModEvent:
        """Returns the event as passed to the mod."""
        context = ContextInfo(self.sequence, self.prompt_len)
        step = quote.quote_step(record.step) if active.is_quote else record.step
        mod_event: ModEvent
        if record.kind == "Prefilled":
            mod_event = Prefilled(self.request_id, step, self.max_tokens, context)
        elif record.kind == "ForwardPass":
            self.logits = array("f", self.logits)
            mod_event = forward = ForwardPass(self.request_id, step, Logits(memoryview(self.logits)), context)
            forward._hidden_states = self._states(active)
        elif record.kind == "Sampled":
            mod_event = drawn = Sampled(self.request_id, step, record.tokens[0], context)
            highest = max(self.logits)
            total = highest + math.log(math.fsum(math.exp(logit - highest) for logit in self.logits))
            drawn._text, drawn.logprob = record.text, self.logits[record.tokens[0]] - total
        else:
            mod_event = Added(self.request_id, step, record.tokens, record.forced, context)
        mod_event.max_steps, mod_event.config, mod_event._tokenizer = self.max_tokens, active.config, self.tokenizer
        mod_event.conversation, mod_event.tools, mod_event.parameters = self.conversation, self.tools, self.parameters
        mod_event.seed, mod_event.model = self.seed, "test"
        return mod_event

    def _apply_to_logits(self, mod_event: ModEvent, action: ModAction, before: Any) -> None:
        """Applies an action to the logits; in-place changes count only with AdjustedLogits."""
        if not isinstance(mod_event, ForwardPass):
            return
        if not isinstance(action, AdjustedLogits):
            self.logits = before
            return
        sparse = action.set if action.set is not None else action.add
        if sparse is not None:
            self.logits = array("f", before)
            for token, value in sparse.items():
                self.logits[token] = value if action.set is not None else self.logits[token] + value
        elif action.logits is not None and action.logits is not mod_event.logits:
            edited = action.logits
            values = edited._view if isinstance(edited, Logits) else flat(edited.to_numpy() if hasattr(edited, "to_numpy") else edited)
            if len(values) != len(before):
                self.logits = before
                raise InvalidActionError("adjust_logits takes %d logits, got %d" % (len(before), len(values)))
            self.logits = array("f", values)
        if any(math.isnan(value) or value == math.inf for value in self.logits) or max(self.logits) == -math.inf:
            self.logits = before
            raise InvalidActionError("the logits must not contain NaN or +inf, nor ban every token; use -inf to ban a token")


class _CurrentRun:
    """Current run, for `get_conversation` and `tokenize`."""

    def __init__(self, run: _Run) -> None:
        self.request_id, self.conversation, self.tools = run.request_id, run.conversation, run.tools
        self.parameters, self.tokenizer = run.parameters, run.tokenizer
