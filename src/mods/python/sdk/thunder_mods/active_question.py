"""A question to the model within its own answer: forces a prompt, constrains the answer, then erases or keeps both.

All decisions are based on the tokens of the sequence at each event, not on counters, so they remain correct if another
mod forces or removes tokens meanwhile.
"""

from __future__ import annotations

import math
from array import array
from enum import Enum
from typing import Any, List, Optional, Sequence, Union

from .actions import ActionBuilder, Backtrack, ForceTokens, ModAction
from .events import Added, ForwardPass, ModEvent
from .logits import Logits, flat
from .strategies.base import Strategy
from .strategies.masks import Mask, end_tokens, pieces_of
from .strategies.primitives import LanguageStrategy

#: Maximum corrections of tokens that do not fit before the question is given up.
MOST_ATTEMPTS = 3


class EraseMode(Enum):
    """Text that is removed once the answer is complete."""

    #: Nothing.
    NONE = "none"
    #: The prompt; the answer is kept.
    PROMPT = "prompt"
    #: The prompt and the answer.
    ALL = "all"

    @classmethod
    def of(cls, value: Any) -> EraseMode:
        """Converts a mode, its name, {"mode": …} or None (NONE)."""
        if isinstance(value, dict):
            value = value.get("mode")
        if value is None:
            return cls.NONE
        return value if isinstance(value, cls) else cls(str(getattr(value, "value", value)).lower())


class Asking:
    """A question in one run."""

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        strategy: Strategy,
        suffix: Sequence[int] = (),
        erase: EraseMode = EraseMode.NONE,
        argmax: bool = False,
        mask_value: float = -math.inf,
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt = list(prompt)
        self._strategy = strategy
        self._suffix = list(suffix) if erase is EraseMode.NONE else []
        self._erase = erase
        self._temperature = 0.0 if argmax else None
        self._mask_value = mask_value
        if isinstance(strategy, LanguageStrategy):
            pieces_of(tokenizer)  # slow the first time, so not during generation
        self._ends = frozenset(end_tokens(tokenizer))
        self._begin: Optional[int] = None
        self._attempts = 0
        self._holding = False
        #: Sequence up to the end of the answer, and its final content.
        self._stood: List[int] = []
        self._target: List[int] = []
        #: True if the answer is complete, or the question was given up.
        self.complete = False
        #: True if the erase mode was applied to the sequence; the run continues.
        self.over = False
        #: Token ids of the answer without its end marker; None if the question was given up.
        self.tokens: Optional[List[int]] = None
        #: Text of the answer; None if the question was given up.
        self.text: Optional[str] = None
        self._restart()

    def forward(self, event: ForwardPass, actions: ActionBuilder) -> ModAction:
        """Returns the action before a draw: forces the prompt, applies the strategy, or erases."""
        tokens = event.context_info.tokens
        asked_back = self._follow(tokens, actions)
        if asked_back is not None:
            return asked_back
        if self.over:
            return actions.noop()
        if self._begin is None:
            prompt = self.ask(event, actions)
            if prompt is not None:
                return prompt
        if self.complete:
            return self._finish(event, tokens, actions)
        return self._hold(event, actions)

    def ask(self, event: ModEvent, actions: ActionBuilder) -> Optional[ModAction]:
        """Begins the question at the end of the sequence. Returns None if it has no prompt."""
        self._begin = len(event.context_info.tokens)
        return actions.force_tokens(self._prompt) if self._prompt else None

    def added(self, event: Added, actions: ActionBuilder) -> Optional[ModAction]:
        """Returns the action after tokens were added, or None."""
        if self.over:
            self._release(event)
            return None
        if self._begin is None:
            return None
        tokens, begin = event.context_info.tokens, self._begin
        asked_back = self._follow(tokens, actions)
        if self._erase is not EraseMode.NONE:
            self._holding = True
            event.hold_back(len(tokens) - begin)
            if not self.complete and self._is_last(event, tokens):
                asked_back, self._begin = None, begin
                self._give_up(tokens)
        if asked_back is not None or not self.complete:
            return asked_back
        action = self._finish(event, tokens, actions)
        return None if self.over else action

    # -- the answer --------------------------------------------------------------------------------------------------

    def _restart(self) -> None:
        self._state = self._strategy.start(self._tokenizer)
        self._seen: List[int] = []

    def _follow(self, tokens: List[int], actions: ActionBuilder) -> Optional[ModAction]:
        """Processes tokens added to the answer. Returns an action if they need a correction."""
        if self._begin is None or self.complete:
            return None
        start = self._begin + len(self._prompt)
        if tokens[self._begin : start] != self._prompt:
            # Another mod removed the question: force the missing part again.
            there = tokens[self._begin :]
            if len(tokens) >= self._begin and there == self._prompt[: len(there)]:
                return actions.force_tokens(self._prompt[len(there) :])
            self._begin = None
            self._restart()
            return None
        answer = tokens[start:]
        if answer[: len(self._seen)] != self._seen:
            self._restart()
        for index in range(len(self._seen), len(answer)):
            asked = self._strategy.step(self._state, answer[index], self._tokenizer)
            self._seen.append(answer[index])
            if asked is not None:
                if isinstance(asked, Backtrack):
                    self._restart()
                return self._put_right(asked, len(answer) - index - 1, tokens, actions)
            if self._strategy.is_complete(self._state):
                self._complete(tokens[: start + index + 1])
                break
        return None

    def _put_right(
        self, asked: Union[Backtrack, ForceTokens], behind: int, tokens: List[int], actions: ActionBuilder
    ) -> Optional[ModAction]:
        """Returns the correction requested by the strategy for a token that is `behind` tokens before the end."""
        self._attempts += 1
        if self._attempts > MOST_ATTEMPTS:
            self._give_up(tokens)
            return None
        if isinstance(asked, Backtrack):
            if asked.n + behind == 0:
                return actions.force_tokens(asked.tokens) if asked.tokens else None
            return actions.backtrack(asked.n + behind, asked.tokens or None)
        return actions.backtrack(behind, asked.tokens) if behind else actions.force_tokens(asked.tokens)

    def _complete(self, tokens: List[int]) -> None:
        """Completes the answer; `tokens` is the sequence up to its end."""
        assert self._begin is not None
        start = self._begin + len(self._prompt)
        answer = tokens[start:]
        if answer and answer[-1] in self._ends:
            answer = answer[:-1]
        text = str(self._tokenizer.decode(answer, skip_special_tokens=True))
        trimmed = self._strategy.trim_answer(text)
        self.text = trimmed
        self.tokens = answer if trimmed == text else self._prefix(answer, trimmed)
        if self._erase is EraseMode.NONE:
            self._end(tokens, tokens[:start] + answer + self._suffix)
        else:
            self._end(tokens, tokens[: self._begin] + (self.tokens if self._erase is EraseMode.PROMPT else []))

    def _end(self, stood: List[int], target: List[int]) -> None:
        self.complete, self._attempts = True, 0
        self._stood, self._target = stood, target

    def _prefix(self, answer: List[int], text: str) -> List[int]:
        """Returns the tokens of a trimmed answer: its own tokens if they spell the text, else a new encoding."""
        for count in range(len(answer), -1, -1):
            if self._tokenizer.decode(answer[:count], skip_special_tokens=True) == text:
                return answer[:count]
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def _is_last(self, event: Added, tokens: List[int]) -> bool:
        """Returns True if the run ends with this event while the question is still in its answer."""
        return 0 < event.max_steps <= len(tokens) - event.context_info.prompt_len

    def _give_up(self, tokens: List[int]) -> None:
        self._end(tokens, tokens if self._erase is EraseMode.NONE else tokens[: self._begin])

    # -- actions -----------------------------------------------------------------------------------------------------

    def _hold(self, event: ForwardPass, actions: ActionBuilder) -> ModAction:
        """Bans every token that cannot continue the answer."""
        strategy, tokenizer = self._strategy, self._tokenizer
        state: Any = self._state
        allowed: Sequence[int]
        if isinstance(strategy, LanguageStrategy):
            mask: Mask = strategy.mask(state, tokenizer)
            ends = pieces_of(tokenizer).ends if strategy.can_end(state) else frozenset()
            if mask.inverted:
                banned = [token for token in mask.tokens if token not in ends]
                return self._ban(event, banned, actions)
            allowed = array("i", [*mask.tokens, *ends]) if ends else mask.tokens
        else:
            forbidden = strategy.disallowed_tokens(state, tokenizer)
            permitted = strategy.allowed_tokens(state, tokenizer)
            if not permitted:
                return self._ban(event, sorted(forbidden), actions) if forbidden else actions.noop()
            size = len(tokenizer)
            allowed = array("i", sorted(token for token in permitted - forbidden if 0 <= token < size))
        if not allowed:
            self._give_up(event.context_info.tokens)
            raise ValueError("no token of this model can continue the answer %r" % self._so_far())
        logits = self._logits(event)
        if not any(logits[token] > -math.inf for token in allowed):
            raise ValueError("an earlier mod has banned every token that can continue the answer %r" % self._so_far())
        logits.keep_only(allowed, self._mask_value)
        return actions.adjust_logits(logits, self._temperature)

    def _ban(self, event: ForwardPass, tokens: Sequence[int], actions: ActionBuilder) -> ModAction:
        if not tokens:
            return actions.noop() if self._temperature is None else actions.adjust_logits(token_temp=self._temperature)
        edits = dict.fromkeys(tokens, self._mask_value)
        if isinstance(event.logits, Logits):
            return actions.adjust_logits(set=edits, token_temp=self._temperature)
        logits = self._logits(event)
        for token in tokens:
            logits[token] = self._mask_value
        return actions.adjust_logits(logits, self._temperature)

    @staticmethod
    def _logits(event: ForwardPass) -> Logits:
        """Returns the event's logits for writing; also works for events created by tests."""
        given = event.logits
        if isinstance(given, Logits):
            return given
        return Logits(memoryview(flat(given.to_numpy() if hasattr(given, "to_numpy") else given)).cast("B").cast("f"))

    def _so_far(self) -> str:
        return str(self._tokenizer.decode(self._seen))

    def _finish(self, event: ModEvent, tokens: List[int], actions: ActionBuilder) -> ModAction:
        """Returns the next action towards the final content of the sequence."""
        stood, target = self._stood, self._target
        extra = tokens[len(stood) :]
        only_appends = target[: len(stood)] == stood
        done = tokens[: len(stood)] != stood or stood == target or (only_appends and bool(extra))
        if done or self._attempts > MOST_ATTEMPTS:
            self.over = True
            self._release(event)
            return actions.noop()
        self._attempts += 1
        if only_appends:
            return actions.force_tokens(target[len(stood) :])
        common = 0
        while common < min(len(target), len(stood)) and target[common] == stood[common]:
            common += 1
        # Tokens appended by another mod meanwhile are kept.
        return actions.backtrack(len(tokens) - common, target[common:] + extra or None)

    def _release(self, event: ModEvent) -> None:
        if self._holding:
            self._holding = False
            event.hold_back(None)
