"""Self prompts: a question to the model with a constrained answer. Both can be erased before the client sees them."""

from __future__ import annotations

import copy
import math
import sys
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

from . import lifecycle
from .actions import ActionBuilder, ModAction
from .active_question import ActiveQuestion, EraseMode
from .decorator import ModCallable, mod
from .events import Added, ForwardPass, ModEvent, Prefilled
from .strategies.strategy_constructor import ChoicesStrat, ListStrat, into_strategy

__all__ = ["EraseMode", "SelfPrompt", "self_prompt_mod"]

#: Text, token ids, or {"text": …} or {"tokens": […]}.
Prompt = Union[str, Sequence[int], Dict[str, Any]]


class SelfPrompt:
    """A question to the model in every run whose events it handles.

    prompt: prompt of the question: text, token ids, {"text": …} or {"tokens": […]}.
    strategy: format of the answer, e.g. ChoicesStrat(["yes", "no"]).
    completion: text, token ids or {"suffix": …} to force after an answer that is kept with its prompt (EraseMode.NONE).
    erase: text that is removed afterwards. With PROMPT and ALL the client never sees it.
    argmax_sampling: take the most probable of the allowed tokens instead of drawing one.
    mask_value: logit of tokens that are not allowed.

    Pass the events Prefilled, ForwardPass and Added to the methods below, and return the resulting action. If the run's
    tokens are used up before the answer is complete, the question is given up: it is erased according to its mode and has
    no answer.
    """

    def __init__(
        self,
        *,
        prompt: Optional[Prompt] = None,
        strategy: Any,
        completion: Optional[Prompt] = None,
        erase: Union[EraseMode, str, None] = EraseMode.NONE,
        argmax_sampling: bool = False,
        mask_value: float = -math.inf,
    ) -> None:
        self._prompt = prompt
        self._strategy = strategy
        self._completion = completion
        self._erase = EraseMode.parse(erase)
        self._argmax = argmax_sampling
        self._mask_value = float(mask_value)
        self._states: Dict[str, ActiveQuestion] = {}
        #: Strategies of the runs with choices of their own.
        self._strategies: Dict[str, Any] = {}
        lifecycle.register(self)

    def handle_prefilled(self, event: Prefilled, tokenizer: Any) -> None:
        """Prepares the question; optional."""
        self._question(event, tokenizer)

    def handle_forward_pass(self, event: ForwardPass, actions: ActionBuilder, tokenizer: Any) -> ModAction:
        """Returns the action for this event."""
        return self._question(event, tokenizer).forward(event, actions)

    def handle_added(self, event: Added, actions: ActionBuilder, tokenizer: Any) -> Optional[ModAction]:
        """Returns the action for this event, or None."""
        return self._question(event, tokenizer).added(event, actions)

    def is_complete(self, request_id: str) -> bool:
        """Returns True if the answer of the run is complete, or the question was given up."""
        question = self._states.get(request_id)
        return question is not None and question.complete

    def answer_tokens(self, request_id: str) -> Optional[List[int]]:
        """Returns the token ids of the run's answer; None without one."""
        question = self._states.get(request_id)
        return None if question is None or question.tokens is None else list(question.tokens)

    def answer(self, request_id: str) -> Optional[str]:
        """Returns the text of the run's answer; None without one."""
        question = self._states.get(request_id)
        return None if question is None else question.text

    def refresh_responses(
        self, responses: Optional[Sequence[str]], request_id: Optional[str] = None, idx: Optional[int] = None
    ) -> None:
        """Replaces the choices, or the choices of element `idx` of a list strategy: those of the run `request_id`, whose
        question starts again, or without it those of all runs that have none of their own."""
        before = self._strategy if request_id is None else self._strategies.get(request_id, self._strategy)
        strategy = _with_choices(before, [str(response) for response in responses or ()], idx)
        if strategy is None:
            return
        if request_id is None:
            self._strategy = strategy
        else:
            self._strategies[request_id] = strategy
            self._states.pop(request_id, None)

    def finished(self, request_id: str) -> None:
        """Removes the state of a run; called automatically when the run ends."""
        self._states.pop(request_id, None)
        self._strategies.pop(request_id, None)

    def _question(self, event: ModEvent, tokenizer: Any) -> ActiveQuestion:
        question = self._states.get(event.request_id)
        if question is None:
            question = self._states[event.request_id] = ActiveQuestion(
                tokenizer,
                token_ids(self._prompt, tokenizer),
                into_strategy(self._strategies.get(event.request_id, self._strategy), tokenizer),
                token_ids(self._completion, tokenizer),
                self._erase,
                self._argmax,
                self._mask_value,
            )
        return question


def _with_choices(strategy: Any, choices: List[str], idx: Optional[int]) -> Any:
    """Returns a copy of a strategy with other choices, for element `idx` of a list strategy; None if it has no choices."""
    target = strategy
    if isinstance(strategy, ListStrat):
        elements: Any = strategy.elements
        target = elements if idx is None else elements[idx]
    if not isinstance(target, ChoicesStrat):
        return None
    changed = copy.copy(target)
    changed.choices = choices
    if target is strategy:
        return changed
    whole = copy.copy(strategy)
    whole.elements = changed
    if idx is not None:
        whole.elements = list(strategy.elements)
        whole.elements[idx] = changed
    return whole


def token_ids(text: Optional[Prompt], tokenizer: Any) -> List[int]:
    """Returns the token ids of a text, a list of ids, or a dictionary with one of them."""
    if isinstance(text, dict):
        if text.get("force") is False:
            return []
        text = next((text[key] for key in ("tokens", "text", "suffix") if text.get(key) is not None), None)
    if not text:
        return []
    if isinstance(text, str):
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
    return [int(token) for token in text]


def self_prompt_mod(
    *,
    prompt: Optional[Prompt] = None,
    strategy: Any,
    completion: Optional[Prompt] = None,
    erase: Union[EraseMode, str, None] = EraseMode.NONE,
    argmax_sampling: bool = False,
    mask_value: float = -math.inf,
    on_answer: Optional[Callable[[str, Optional[str]], Any]] = None,
    name: Optional[str] = None,
    description: Optional[str] = None,
) -> ModCallable:
    """Creates a mod that asks one question at the beginning of every answer. The arguments are those of `SelfPrompt`.

        sentiment = self_prompt_mod(prompt=" The user is ", strategy=ChoicesStrat(["calm", "upset"]), erase="all")

    on_answer: called with (request id, answer or None) once the answer is complete. name: registered name, by default the
    variable name in the module. The question is the attribute `self_prompt`, e.g. for `answer(request_id)`.
    """
    question = SelfPrompt(
        prompt=prompt,
        strategy=strategy,
        completion=completion,
        erase=erase,
        argmax_sampling=argmax_sampling,
        mask_value=mask_value,
    )

    def ask(event: ModEvent, actions: ActionBuilder, tokenizer: Any) -> Optional[ModAction]:
        was_complete = question.is_complete(event.request_id)
        action: Optional[ModAction] = None
        if isinstance(event, Prefilled):
            question.handle_prefilled(event, tokenizer)
        elif isinstance(event, ForwardPass):
            action = question.handle_forward_pass(event, actions, tokenizer)
        elif isinstance(event, Added):
            action = question.handle_added(event, actions, tokenizer)
        if on_answer is not None and not was_complete and question.is_complete(event.request_id):
            on_answer(event.request_id, question.answer(event.request_id))
        return action

    result: Any = mod(events=[Prefilled, ForwardPass, Added], name=name, description=description or "Asks the model a question.")(ask)
    if name is None:
        result.__thunder_mod__["name"] = None
    # The mod belongs to the calling module, like a function with @mod.
    result.__module__ = sys._getframe(1).f_globals.get("__name__", result.__module__)
    result.self_prompt = question
    question_mod: ModCallable = result
    return question_mod
