"""The four events of a run. Expensive fields are read on first use."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, Type

from . import logits as _logits


class InvalidActionError(ValueError):
    """Raised if the event does not permit the action, or if a value of the action is invalid."""


def check_count(count: Any, expected: str, minimum: float = -math.inf, hint: str = "") -> int:
    """Returns a number of tokens as an int. Raises InvalidActionError if `int` cannot convert it without loss, or if it is
    below the minimum."""
    try:
        number = int(count)
        is_valid = number >= minimum and (isinstance(count, str) or number == count)
    except (TypeError, ValueError, OverflowError):
        is_valid = False
    if not is_valid:
        raise InvalidActionError("%s, got %.40r%s" % (expected, count, hint))
    return number


class ContextInfo:
    """Sequence of a run: prompt tokens, then generated tokens.

    The tokens are read during the call, not in `finished`. A list of tokens stays valid after it; a field that was not read before raises
    RuntimeError."""

    def __init__(
        self,
        tokens: Iterable[int] = (),
        prompt_len: Optional[int] = None,
        read: Optional[Callable[[int], List[int]]] = None,
        evicted: int = 0,
        evictions_end: int = 0,
    ) -> None:
        self._tokens: Optional[List[int]] = None if read else list(tokens)
        self._read = read
        self._prompt_len: int = len(self._tokens or ()) if prompt_len is None else prompt_len
        self._evicted = evicted
        self._evictions_end = evictions_end

    @property
    def tokens(self) -> List[int]:
        """All token ids."""
        if self._tokens is None:
            self._tokens = self._read(0) if self._read else []
        return self._tokens

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return self._prompt_len

    @property
    def evicted(self) -> int:
        """Number of generated tokens that a full context has evicted: they are part of the answer, but not of `tokens`."""
        return self._evicted

    @property
    def evictions_end(self) -> int:
        """Index in `tokens` of the first token that followed all evicted ones; 0 if none were evicted."""
        return self._evictions_end

    @property
    def prompt(self) -> List[int]:
        """Token ids of the prompt."""
        return self.tokens[: self._prompt_len]

    @property
    def generated(self) -> List[int]:
        """Token ids after the prompt."""
        return self.tokens[self._prompt_len :]

    @property
    def _answer_len(self) -> int:
        """Number of generated tokens, including those that a full context has evicted."""
        return len(self.tokens) - self._prompt_len + self._evicted

    def last(self, count: int) -> List[int]:
        """Returns the last `count` token ids; cheaper than `tokens[-count:]`."""
        if self._tokens is None and self._read and count:
            return self._read(count)
        return self.tokens[-count:] if count else []

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a field by name."""
        return getattr(self, name, default)

    def _end_call(self) -> None:
        """Prevents further reads, which would return tokens of a later call or of another run."""
        if self._read is not None:
            self._read = _read_after_call


def _read_after_call(_: int) -> List[int]:
    raise RuntimeError("the tokens of an event can only be read during its call; read `context_info.tokens` there")


class ModEvent:
    """Base class of the events."""

    #: Id of the run chosen by the client.
    request_id: str = ""
    #: Step: 0 for Prefilled, then 1, 2, 3 …, as in the trace. Mods that import `quote_mod_sdk` or `shared.types` get
    #: Quote's numbers: 0 for Prefilled and for the first ForwardPass, Sampled and Added.
    step: int = 0
    #: Quote's name for `max_tokens`.
    max_steps: int = 0
    #: Configuration of this mod: the request's fields over the defaults of `@mod(config=…)`.
    config: Dict[str, Any] = {}
    #: Messages of the request; None for a raw completion.
    conversation: Optional[List[Dict[str, Any]]] = None
    #: Tools of the request, or None.
    tools: Optional[List[Dict[str, Any]]] = None
    #: Sampling parameters of the request.
    parameters: Optional[Dict[str, Any]] = None
    #: Random seed of the request.
    seed: int = 0
    #: Name of the model.
    model: Optional[str] = None
    #: Per-layer data that only Quote's engine provides; always None. Thunder has `ForwardPass.hidden_state`.
    hidden_states: Any = None
    attention_patterns: Any = None
    layer: Optional[int] = None
    _tokenizer: Any = None
    _held_back: Optional[int] = None
    #: Number of the answer's first tokens that are not discarded.
    _discard_from: Optional[int] = None

    def __init__(self, request_id: str, step: int, context_info: Optional[ContextInfo] = None) -> None:
        self.request_id = request_id
        self.step = step
        self.context_info = context_info if context_info is not None else ContextInfo()

    @property
    def max_tokens(self) -> int:
        """Maximum number of generated tokens."""
        return self.max_steps

    @property
    def input_ids(self) -> List[int]:
        """All token ids of the sequence."""
        return self.context_info.tokens

    def hold_back(self, count: Optional[int], discard: bool = False) -> None:
        """Holds the last `count` generated tokens back from the client until the next call of this method, so that
        they can still be removed before the client sees them. A negative count is 0; None restores the value of
        `@mod(holdback=…)`.

        discard: the mod will remove these tokens and those after them, which are held back, too. A stop string in them
        does not end the run, and if the run ends, they are not part of the answer. This applies until all are removed,
        this method is called again, or the mod's next `Added` event ends without a call of this method."""
        self._held_back = -1 if count is None else max(0, check_count(count, "`count` of hold_back must be an integer or None"))
        self._discard_from = max(0, self.context_info._answer_len - self._held_back) if discard and self._held_back > 0 else None

    def _decode(self, tokens: Iterable[int]) -> str:
        if self._tokenizer is None:
            raise RuntimeError("this event has no tokenizer, so it cannot decode")
        return str(self._tokenizer.decode(tokens))

    def __repr__(self) -> str:
        return "%s(request_id=%r, step=%r)" % (type(self).__name__, self.request_id, self.step)


class Prefilled(ModEvent):
    """Event at the start of a run: the prompt is tokenized but not yet decoded."""

    #: Images of the request; `tokens` are the first placeholders of their tiles.
    _sent_images: List[Dict[str, Any]] = []

    def __init__(
        self, request_id: str, step: int, max_steps: int, context_info: Optional[ContextInfo] = None, **_ignored: Any
    ) -> None:
        super().__init__(request_id, step, context_info)
        self.max_steps = max_steps

    @property
    def prompt_tokens(self) -> List[int]:
        """Token ids of the prompt."""
        return self.context_info.prompt

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return self.context_info._prompt_len

    @property
    def prompt_text(self) -> str:
        """Text of the prompt, with `<image>` for each image."""
        return self._decode(self.prompt_tokens)

    @property
    def images(self) -> List[Dict[str, Any]]:
        """Images of the prompt, one entry for each tile: `start` and `length` of its placeholder tokens, whose ids are below
        -1; `sha256` of the image file in hexadecimal, `width` and `height` in pixels (None if unknown)."""
        tiles = {token: image for image in self._sent_images for token in image["tokens"]}
        found: List[Dict[str, Any]] = []
        for index, token in enumerate(self.prompt_tokens):
            if token >= -1:
                continue
            if token not in tiles and found and found[-1]["start"] + found[-1]["length"] == index:
                found[-1]["length"] += 1
            else:
                image = tiles.get(token, {})
                found.append({"start": index, "length": 1, **{key: image.get(key) for key in ("sha256", "width", "height")}})
        return found


class HiddenStates:
    """Hidden states of one step, of the layers that the mod declares."""

    def __init__(self, declared: Iterable[int] = (), layers: Optional[int] = None, view: Any = None) -> None:
        self._layers = layers
        self._declared = [self._from_start(layer) for layer in declared]
        self._view = view  # memoryview, one dimension, format "f": the declared layers, one after the other

    def _from_start(self, layer: int) -> int:
        return layer + self._layers if layer < 0 and self._layers is not None else layer

    def state(self, layer: int) -> Any:
        """Returns the state of a layer."""
        number = self._from_start(layer)
        if number not in self._declared:
            raise ValueError("layer %r is not declared; declare it with @mod(hidden_states=[%r])" % (layer, layer))
        if self._view is None:
            raise RuntimeError(
                "this step has no hidden states: there are none in a replay of a recorded run, and after an image or a restored state"
            )
        width = len(self._view) // len(self._declared)
        index = self._declared.index(number)
        view = self._view[index * width : (index + 1) * width]
        np = _logits.numpy()
        return view if np is None else np.frombuffer(view, dtype=np.float32)


class ForwardPass(ModEvent):
    """Event after a forward pass, before sampling."""

    def __init__(
        self, request_id: str, step: int, logits: Any, context_info: Optional[ContextInfo] = None, **_ignored: Any
    ) -> None:
        super().__init__(request_id, step, context_info)
        #: float32 of shape (1, vocabulary), writable in place, before temperature and penalties.
        self.logits = logits
        self._hidden_states = HiddenStates()

    @property
    def input_text(self) -> str:
        """The last 70 characters of the sequence."""
        return self._decode(self.context_info.last(280))[-70:]

    def hidden_state(self, layer: int) -> Any:
        """Returns the hidden state of the last token after a layer that the mod declares with `@mod(hidden_states=[…])`:
        float32 of shape (width,), as a numpy array, or as a memoryview without numpy.

        A view of shared memory, valid only during the call; copy values that are needed later. Raises RuntimeError if the
        step has no hidden states."""
        return self._hidden_states.state(layer)

    def top_k_logprob(self, k: int) -> Tuple[Any, Any]:
        """Returns (natural log-probabilities, token ids) of the k most probable tokens, each of shape (1, k), highest first."""
        return _logits.top_k_logprob(self.logits, k)


class Sampled(ModEvent):
    """Event after a token was drawn, before it is appended."""

    #: Natural logarithm of the token's probability.
    logprob: Optional[float] = None

    def __init__(
        self, request_id: str, step: int, sampled_token: int, context_info: Optional[ContextInfo] = None
    ) -> None:
        super().__init__(request_id, step, context_info)
        self.sampled_token = sampled_token
        self._text: Optional[str] = None

    @property
    def text(self) -> str:
        """Text of the drawn token."""
        return self._decode([self.sampled_token]) if self._text is None else self._text

    token_text = text


class Added(ModEvent):
    """Event after tokens were appended; they are the end of the sequence."""

    def __init__(
        self,
        request_id: str,
        step: int,
        added_tokens: Iterable[int],
        forced: bool,
        context_info: Optional[ContextInfo] = None,
    ) -> None:
        super().__init__(request_id, step, context_info)
        self.added_tokens = list(added_tokens)
        #: True if a mod appended them, not the sampler.
        self.forced = forced

    @property
    def text(self) -> str:
        """Text of the added tokens."""
        return self._decode(self.added_tokens)


BY_NAME: Dict[str, Type[ModEvent]] = {cls.__name__: cls for cls in (Prefilled, ForwardPass, Sampled, Added)}
