"""A question to the model within its answer: forces a prompt, constrains the reply, then erases or keeps both.

All decisions are based on the tokens of the sequence at each event, not on counters, so that they remain correct if
another mod forces or removes tokens. The position of the question counts from the start of the answer, including tokens
that a full context has evicted, so that an eviction does not change it.
"""

from __future__ import annotations

import math
from array import array
from enum import Enum
from typing import Any, List, Optional, Sequence, Union

from .actions import ActionBuilder, Backtrack, ForceTokens, ModAction
from .events import Added, ContextInfo, ForwardPass, ModEvent
from .logits import Logits, flat
from .strategies.base import Strategy
from .strategies.masks import Mask, end_tokens, token_pieces
from .strategies.primitives import LanguageStrategy

#: Maximum number of corrections of tokens that do not fit; then the question is given up. Also the maximum number of
#: attempts to erase it, of which other mods may win the event.
MAX_ATTEMPTS = 3


class EraseMode(Enum):
    """Text that is removed once the answer is complete."""

    #: Nothing.
    NONE = "none"
    #: The prompt; the answer is kept.
    PROMPT = "prompt"
    #: The prompt and the answer.
    ALL = "all"

    @classmethod
    def parse(cls, value: Any) -> EraseMode:
        """Converts a mode, its name, {"mode": …} or None (NONE)."""
        if isinstance(value, dict):
            value = value.get("mode")
        if value is None:
            return cls.NONE
        return value if isinstance(value, cls) else cls(str(getattr(value, "value", value)).lower())


class _Phase(Enum):
    #: The question begins at the next draw.
    WAITING = 0
    #: The prompt or the answer is not complete.
    ASKING = 1
    #: The answer is complete or was given up; what is not kept is being replaced.
    ERASING = 2
    #: The run continues.
    OVER = 3


class ActiveQuestion:
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
            token_pieces(tokenizer)  # slow the first time, so done before generation
        self._ends = frozenset(end_tokens(tokenizer))
        self._phase = _Phase.WAITING
        #: Position of the question in the answer, once it has begun.
        self._start = 0
        #: Tokens from the start of the question on, at the last event.
        self._tokens: List[int] = []
        self._corrections = 0
        self._erasures = 0
        self._gives_up = False
        self._holds_back = False
        #: Question with its answer, and the tokens that replace them.
        self._original: List[int] = []
        self._target: List[int] = []
        #: Token ids of the answer without its end marker; None if the question was given up.
        self.tokens: Optional[List[int]] = None
        #: Text of the answer; None if the question was given up.
        self.text: Optional[str] = None
        self._restart_strategy()

    @property
    def complete(self) -> bool:
        """True if the answer is complete, or the question was given up."""
        return self._phase in (_Phase.ERASING, _Phase.OVER)

    @property
    def is_over(self) -> bool:
        """True if the erase mode was applied to the sequence; the run continues."""
        return self._phase is _Phase.OVER

    def handle(self, event: Union[ForwardPass, Added], actions: ActionBuilder) -> Optional[ModAction]:
        """Returns the action for an event, or None."""
        return self.forward(event, actions) if isinstance(event, ForwardPass) else self.added(event, actions)

    def forward(self, event: ForwardPass, actions: ActionBuilder) -> ModAction:
        """Returns the action before a draw: forces the prompt, applies the strategy, or erases."""
        if self.is_over:
            return actions.noop()
        tokens = self._read(event.context_info)
        correction = self._follow(tokens, actions)
        if correction is not None:
            return correction
        if self._phase is _Phase.WAITING:
            prompt = self.begin(event, actions)
            if prompt is not None:
                return prompt
        if self.complete:
            return self._finish(event, tokens, actions)
        return self._constrain(event, tokens, actions)

    def begin(self, event: ModEvent, actions: ActionBuilder) -> Optional[ModAction]:
        """Begins the question at the end of the sequence. Returns None if it has no prompt."""
        self._phase, self._start, self._tokens = _Phase.ASKING, event.context_info._answer_len, []
        return actions.force_tokens(self._prompt) if self._prompt else None

    def added(self, event: Added, actions: ActionBuilder) -> Optional[ModAction]:
        """Returns the action after tokens were added, or None."""
        if self.is_over:
            self._release(event)
            return None
        if self._phase is _Phase.WAITING:
            return None
        tokens = self._read(event.context_info)
        if self._erase is not EraseMode.NONE:
            self._holds_back = True
            event.hold_back(len(tokens), discard=True)
        correction = self._follow(tokens, actions)
        if not self.complete and self._erase is not EraseMode.NONE and self._is_last(event):
            self._give_up(tokens)
        if self._phase is _Phase.WAITING:
            self._release(event)
        if not self.complete:
            return correction
        action = self._finish(event, tokens, actions)
        return None if self.is_over else action

    def give_up(self) -> None:
        """Gives the question up at the next event, with a token that is drawn until then; it then has no answer."""
        self._gives_up = True

    # -- the answer --------------------------------------------------------------------------------------------------

    def _restart(self) -> None:
        """Begins the question again at the next draw, because another mod removed it."""
        self._phase = _Phase.WAITING
        self._restart_strategy()

    def _restart_strategy(self) -> None:
        self._state = self._strategy.start(self._tokenizer)
        self._seen: List[int] = []

    def _read(self, context: ContextInfo) -> List[int]:
        """Returns the tokens from the start of the question on, including those that were evicted since."""
        if self._phase is _Phase.WAITING:
            return []
        # The evicted tokens of the answer were before this index.
        gap = max(context.prompt_len, context.evictions_end)
        before = context.tokens[context.prompt_len + self._start : gap]
        position = context.prompt_len + self._start - context.evicted
        evicted = self._tokens[len(before) : max(len(before), gap - position)]
        self._tokens = before + evicted + context.tokens[max(gap, position) :]
        if position > len(context.tokens) and not self.complete:
            # Tokens before it were removed, too.
            self._restart()
        return self._tokens

    def _follow(self, tokens: List[int], actions: ActionBuilder) -> Optional[ModAction]:
        """Processes tokens added to the answer. Returns an action if they need a correction."""
        if self._gives_up and not self.complete:
            self._give_up(tokens)
        if self._phase is not _Phase.ASKING:
            return None
        start = len(self._prompt)
        if tokens[:start] != self._prompt:
            if tokens == self._prompt[: len(tokens)]:
                # Another mod removed the end of the prompt.
                return actions.force_tokens(self._prompt[len(tokens) :])
            self._restart()
            return None
        answer = tokens[start:]
        if answer[: len(self._seen)] != self._seen:
            self._restart_strategy()
        for index in range(len(self._seen), len(answer)):
            correction = self._strategy.step(self._state, answer[index], self._tokenizer)
            self._seen.append(answer[index])
            if correction is not None:
                if isinstance(correction, Backtrack):
                    self._restart_strategy()
                return self._correct(correction, len(answer) - index - 1, tokens, actions)
            if self._strategy.is_complete(self._state):
                self._complete(tokens[: start + index + 1])
                break
        return None

    def _correct(
        self, correction: Union[Backtrack, ForceTokens], distance: int, tokens: List[int], actions: ActionBuilder
    ) -> Optional[ModAction]:
        """Returns the correction requested by the strategy for a token that is `distance` tokens before the end."""
        self._corrections += 1
        if self._corrections > MAX_ATTEMPTS:
            self._give_up(tokens)
            return None
        if isinstance(correction, Backtrack):
            if correction.n + distance == 0:
                return actions.force_tokens(correction.tokens) if correction.tokens else None
            return actions.backtrack(correction.n + distance, correction.tokens or None)
        return actions.backtrack(distance, correction.tokens) if distance else actions.force_tokens(correction.tokens)

    def _complete(self, tokens: List[int]) -> None:
        """Completes the answer; `tokens` are the question and its answer."""
        prompt = tokens[: len(self._prompt)]
        answer = tokens[len(prompt) :]
        if answer and answer[-1] in self._ends:
            answer = answer[:-1]
        text = str(self._tokenizer.decode(answer, skip_special_tokens=True))
        trimmed = self._strategy.trim_answer(text)
        self.text = trimmed
        self.tokens = answer if trimmed == text else self._prefix(answer, trimmed)
        if self._erase is EraseMode.NONE:
            self._end(tokens, prompt + answer + self._suffix)
        else:
            self._end(tokens, self.tokens if self._erase is EraseMode.PROMPT else [])

    def _end(self, original: List[int], target: List[int]) -> None:
        self._phase, self._original, self._target = _Phase.ERASING, original, target

    def _prefix(self, answer: List[int], text: str) -> List[int]:
        """Returns the tokens of a trimmed answer: its own tokens if they spell the text, else a new encoding."""
        for count in range(len(answer), -1, -1):
            if self._tokenizer.decode(answer[:count], skip_special_tokens=True) == text:
                return answer[:count]
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    @staticmethod
    def _is_last(event: Added) -> bool:
        """Returns True if the run ends with this event, before the answer is complete."""
        return 0 < event.max_steps <= event.context_info._answer_len

    def _give_up(self, tokens: List[int]) -> None:
        self._end(tokens, tokens if self._erase is EraseMode.NONE else [])

    # -- actions -----------------------------------------------------------------------------------------------------

    def _constrain(self, event: ForwardPass, tokens: List[int], actions: ActionBuilder) -> ModAction:
        """Bans every token that cannot continue the answer."""
        strategy, tokenizer = self._strategy, self._tokenizer
        state: Any = self._state
        allowed: Sequence[int]
        if isinstance(strategy, LanguageStrategy):
            mask: Mask = strategy.mask(state, tokenizer)
            ends = token_pieces(tokenizer).ends if strategy.can_end(state) else frozenset()
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
            self._give_up(tokens)
            raise ValueError("no token of this model can continue the answer %r" % self._answer_so_far())
        logits = self._logits(event)
        if not any(logits[token] > -math.inf for token in allowed):
            raise ValueError("an earlier mod has banned every token that can continue the answer %r" % self._answer_so_far())
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
        logits = event.logits
        if isinstance(logits, Logits):
            return logits
        return Logits(memoryview(flat(logits.to_numpy() if hasattr(logits, "to_numpy") else logits)).cast("B").cast("f"))

    def _answer_so_far(self) -> str:
        return str(self._tokenizer.decode(self._seen))

    def _finish(self, event: ModEvent, tokens: List[int], actions: ActionBuilder) -> ModAction:
        """Returns the next action that replaces the question and its answer with what is kept of them."""
        original, target = self._original, self._target
        extra = tokens[len(original) :]
        only_appends = target[: len(original)] == original
        is_done = tokens[: len(original)] != original or original == target or (only_appends and bool(extra))
        if is_done or self._erasures > MAX_ATTEMPTS:
            self._phase = _Phase.OVER
            self._release(event)
            return actions.noop()
        self._erasures += 1
        if only_appends:
            return actions.force_tokens(target[len(original) :])
        common = 0
        if self._erase is EraseMode.NONE:
            # The client may have received the question, so only the end is replaced.
            while common < min(len(target), len(original)) and target[common] == original[common]:
                common += 1
        # Tokens that another mod has appended are kept.
        return actions.backtrack(len(tokens) - common, target[common:] + extra or None)

    def _release(self, event: ModEvent) -> None:
        if self._holds_back:
            self._holds_back = False
            event.hold_back(None)
