"""The four events of a run. Fields that cost something to look up are read when they are first used."""

from . import logits as _logits


class ContextInfo:
    """The sequence: prompt tokens, then generated tokens."""

    def __init__(self, tokens=(), prompt_len=None, read=None):
        self._tokens = None if read else list(tokens)
        self._read = read
        self._prompt_len = len(tokens) if prompt_len is None else prompt_len

    @property
    def tokens(self):
        """All token ids."""
        if self._tokens is None:
            self._tokens = self._read(0)
        return self._tokens

    @property
    def prompt_len(self):
        return self._prompt_len

    @property
    def prompt(self):
        """Token ids of the prompt."""
        return self.tokens[: self._prompt_len]

    @property
    def generated(self):
        """Token ids after the prompt."""
        return self.tokens[self._prompt_len :]

    def last(self, count):
        """The last `count` token ids; cheaper than `tokens[-count:]`."""
        if self._tokens is None:
            return self._read(count)
        return self._tokens[-count:] if count else []

    def get(self, name, default=None):
        return getattr(self, name, default)


class ModEvent:
    """What all events have."""

    #: The client's id of the run.
    request_id = None
    #: 0 for Prefilled, then 1, 2, 3 …
    step = 0
    #: Most tokens to generate.
    max_steps = None
    #: What the request gave this mod as its configuration, over the defaults of `@mod(config=…)`.
    config = {}
    #: The request's messages; None for a raw completion.
    conversation = None
    #: The request's tools, or None.
    tools = None
    #: The request's sampling parameters.
    parameters = None
    #: The request's random seed.
    seed = 0
    #: The model's name.
    model = None
    _tokenizer = None

    def __init__(self, request_id, step, context_info=None):
        self.request_id = request_id
        self.step = step
        self.context_info = context_info if context_info is not None else ContextInfo()

    @property
    def input_ids(self):
        """All token ids of the sequence."""
        return self.context_info.tokens

    def _decode(self, tokens):
        if self._tokenizer is None:
            raise RuntimeError("this event was made without a tokenizer, so it cannot decode")
        return self._tokenizer.decode(tokens)

    def __repr__(self):
        return "%s(request_id=%r, step=%r)" % (type(self).__name__, self.request_id, self.step)


class Prefilled(ModEvent):
    """Once per run: the prompt is tokenized and not yet decoded."""

    def __init__(self, request_id, step, max_steps, context_info=None, **_ignored):
        super().__init__(request_id, step, context_info)
        self.max_steps = max_steps

    @property
    def prompt_tokens(self):
        return self.context_info.prompt

    @property
    def prompt_length(self):
        return self.context_info._prompt_len

    @property
    def prompt_text(self):
        return self._decode(self.prompt_tokens)


class ForwardPass(ModEvent):
    """The model has run, nothing is sampled yet."""

    def __init__(self, request_id, step, logits, context_info=None, **_ignored):
        super().__init__(request_id, step, context_info)
        self.logits = logits

    @property
    def input_text(self):
        """The last 70 characters of the sequence."""
        return self._decode(self.context_info.last(280))[-70:]

    def top_k_logprob(self, k):
        """(log-probabilities, token ids) of the k most probable tokens, each of shape (1, k), highest first."""
        return _logits.top_k_logprob(self.logits, k)


class Sampled(ModEvent):
    """A token was drawn and is not yet appended."""

    #: Natural logarithm of the token's probability.
    logprob = None

    def __init__(self, request_id, step, sampled_token, context_info=None):
        super().__init__(request_id, step, context_info)
        self.sampled_token = sampled_token
        self._text = None

    @property
    def text(self):
        """The drawn token's text."""
        return self._decode([self.sampled_token]) if self._text is None else self._text

    token_text = text


class Added(ModEvent):
    """Tokens were appended; they are the end of the sequence."""

    def __init__(self, request_id, step, added_tokens, forced, context_info=None):
        super().__init__(request_id, step, context_info)
        self.added_tokens = list(added_tokens)
        self.forced = forced

    @property
    def text(self):
        """Text of the added tokens."""
        return self._decode(self.added_tokens)


BY_NAME = {cls.__name__: cls for cls in (Prefilled, ForwardPass, Sampled, Added)}
