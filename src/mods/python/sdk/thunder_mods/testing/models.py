"""Models for tests: functions from tokens to the logits of the next token."""

from __future__ import annotations

import random
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Union

#: (token ids so far) -> logits, one per token of the vocabulary, or {token id: logit} with -20 for all others.
LogitsFunction = Callable[[List[int]], Union[Sequence[float], Mapping[int, float]]]

_DEFAULT_LOGIT = -20.0


class Scripted:
    """A model that writes `text`, or answers from `answers`, and then ends the run.

    answers: {end of a question: answer}. If the text after the last question in the sequence is a prefix of its answer,
    the model writes the rest of the answer.
    text: otherwise the model writes the rest of `text` if the generated text is a prefix of it. If not, the model skips
    as many tokens of `text` as were generated, and writes the remaining ones.
    """

    def __init__(self, text: str = "", answers: Optional[Mapping[str, str]] = None) -> None:
        self.text = text
        self.answers: Dict[str, str] = dict(answers or {})

    def logits(self, tokens: List[int], prompt_len: int, tokenizer: Any) -> List[float]:
        """Returns the logits after these tokens, of which `prompt_len` are the prompt."""
        rest = self._rest(tokens, prompt_len, tokenizer).encode("utf-8")
        logits = [0.0] * len(tokenizer)
        if rest:
            special = frozenset(tokenizer.all_special_ids)
            for token in range(len(logits)):
                piece = tokenizer.piece(token)
                if piece and token not in special and rest.startswith(piece):
                    logits[token] = 20.0 + len(piece)
        else:
            for token in tokenizer.end_of_generation:
                logits[token] = 20.0
        return logits

    def _rest(self, tokens: List[int], prompt_len: int, tokenizer: Any) -> str:
        whole = tokenizer.decode(tokens)
        last_question = max(self.answers, key=whole.rfind, default=None)
        if last_question is not None and last_question in whole:
            written = whole[whole.rfind(last_question) + len(last_question) :]
            if self.answers[last_question].startswith(written):
                return self.answers[last_question][len(written) :]
        written = tokenizer.decode(tokens[prompt_len:])
        if self.text.startswith(written):
            return self.text[len(written) :]
        return str(tokenizer.decode(tokenizer.encode(self.text)[len(tokens) - prompt_len :]))


class RandomWeights:
    """A random model: its logits depend on the seed and the last eight tokens."""

    def __init__(self, seed: int = 0, spread: float = 2.0) -> None:
        self.seed = seed
        self.spread = spread

    def logits(self, tokens: List[int], prompt_len: int, tokenizer: Any) -> List[float]:
        """Returns the logits after these tokens."""
        source = random.Random("%d %r" % (self.seed, tokens[-8:]))
        width, draw = 4.0 * self.spread, source.random
        return [width * draw() for _ in range(len(tokenizer))]


class Function:
    """A model defined by a function of the tokens."""

    def __init__(self, function: LogitsFunction) -> None:
        self.function = function

    def logits(self, tokens: List[int], prompt_len: int, tokenizer: Any) -> List[float]:
        """Returns the logits after these tokens."""
        found = self.function(list(tokens))
        if isinstance(found, Mapping):
            return [float(found.get(token, _DEFAULT_LOGIT)) for token in range(len(tokenizer))]
        if len(found) != len(tokenizer):
            raise ValueError("a model must return %d logits, one per token, got %d" % (len(tokenizer), len(found)))
        return [float(logit) for logit in found]


def to_model(value: Any) -> Any:
    """Converts a text, a mapping of answers, a function or a model to a model."""
    if value is None or isinstance(value, str):
        return Scripted(value or "")
    if isinstance(value, Mapping):
        return Scripted(answers=value)
    return value if hasattr(value, "logits") else Function(value)
