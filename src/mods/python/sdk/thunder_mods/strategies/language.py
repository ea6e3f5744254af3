"""Sets of possible answers, as automata that read one byte at a time.

An automaton is in a set of configurations, since an answer can be parsed in several ways at once: after `yes`, the choices
`yes` and `yes, but` are both possible. A configuration is a hashable value that only its language can interpret.
"""

from __future__ import annotations

from typing import Any, Iterator, Optional, Sequence, Tuple

from .alphabet import CharsMode, can_become, class_ends, class_needs, class_step, push_byte

Config = Any


class Language:
    """A set of texts. Equal languages are interchangeable, so that they share cached results."""

    def key(self) -> Tuple[Any, ...]:
        """Returns the parameters that define this language."""
        raise NotImplementedError

    def first(self) -> Iterator[Config]:
        """Yields the configurations before the first byte."""
        raise NotImplementedError

    def step(self, config: Config, byte: int) -> Iterator[Config]:
        """Yields the configurations after one more byte."""
        raise NotImplementedError

    def accepts(self, config: Config) -> bool:
        """Returns True if the bytes read so far are one of the texts."""
        raise NotImplementedError

    def canonicalize(self, config: Config, horizon: int) -> Config:
        """Returns a canonical configuration from which the same texts of up to `horizon` bytes can follow."""
        return config

    def stop_read(self, config: Config) -> bytes:
        """Returns the stop text with which the configuration ended, if it did."""
        return b""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash((type(self), self.key()))


class Choices(Language):
    """One of several texts. A configuration is the bytes read so far."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = frozenset(text.encode("utf-8") for text in texts)
        self._prefixes = frozenset(text[:end] for text in self._texts for end in range(len(text) + 1))

    def key(self) -> Tuple[Any, ...]:
        return (self._texts,)

    def first(self) -> Iterator[Config]:
        yield b""

    def step(self, config: Config, byte: int) -> Iterator[Config]:
        read = config + bytes((byte,))
        if read in self._prefixes:
            yield read

    def accepts(self, config: Config) -> bool:
        return config in self._texts


class Until(Language):
    """A start text, then any text, up to and including the first of several end texts.

    Configurations: ("start", number of its bytes read), ("text", possible beginning of an end, unfinished character), "end".
    """

    def __init__(self, start: str, ends: Sequence[str]) -> None:
        self._start = start.encode("utf-8")
        self._ends = tuple(end.encode("utf-8") for end in ends)
        self._beginnings = frozenset(end[:length] for end in self._ends for length in range(1, len(end)))

    def key(self) -> Tuple[Any, ...]:
        return self._start, self._ends

    def first(self) -> Iterator[Config]:
        yield ("start", 0) if self._start else ("text", b"", b"")

    def step(self, config: Config, byte: int) -> Iterator[Config]:
        if config == "end":
            return
        if config[0] == "start":
            if self._start[config[1]] == byte:
                read = config[1] + 1
                yield ("start", read) if read < len(self._start) else ("text", b"", b"")
            return
        decoded = push_byte(config[2], byte)
        if decoded is None:
            return
        recent: bytes = config[1] + bytes((byte,))
        if recent.endswith(self._ends):
            yield "end"
            return
        while recent and recent not in self._beginnings:
            recent = recent[1:]
        yield "text", recent, decoded[0]

    def accepts(self, config: Config) -> bool:
        return bool(config == "end")


class Chars(Language):
    """Between `low` and `high` characters of one kind, then `stop`.

    Configurations: ("body", state of the kind, number of characters, length of a partial stop at the end, unfinished
    character), ("stop", number of its bytes read). The number of characters is -1 if neither bound is relevant within
    the horizon. The body ends at the first stop, so it never contains one.
    """

    def __init__(self, mode: CharsMode, low: int, high: Optional[int], stop: str) -> None:
        self._mode, self._low, self._high = mode, low, high
        self._stop, self._stop_bytes = stop, stop.encode("utf-8")

    def key(self) -> Tuple[Any, ...]:
        return self._mode, self._low, self._high, self._stop

    def first(self) -> Iterator[Config]:
        yield "body", "", 0, 0, b""

    def step(self, config: Config, byte: int) -> Iterator[Config]:
        if config[0] == "stop":
            if config[1] < len(self._stop_bytes) and self._stop_bytes[config[1]] == byte:
                yield "stop", config[1] + 1
            return
        _, state, count, match, pending = config
        if self._stop and self._stop_bytes[0] == byte and self._complete(config):
            yield "stop", 1
        decoded = push_byte(pending, byte)
        high = None if count < 0 else self._high
        if decoded is None or (high is not None and count >= high):
            return
        pending, char = decoded
        if not char:
            if state == "escaped" or can_become(self._mode, pending):
                yield "body", state, count, match, pending
            return
        after = class_step(self._mode, state, char)
        if after is None:
            return
        if self._stop:
            match = 0 if state == "escaped" else self._matched(match, char)
            if match == len(self._stop):
                return
        if high is not None and count + 1 + class_needs(self._mode, after) > high:
            return
        if count >= 0:
            count = count + 1 if high is not None else min(count + 1, self._low)
        yield "body", after, count, match, b""

    def accepts(self, config: Config) -> bool:
        if config[0] == "stop":
            return bool(config[1] == len(self._stop_bytes))
        return not self._stop and self._complete(config)

    def canonicalize(self, config: Config, horizon: int) -> Config:
        if config[0] == "body" and self._high is not None:
            _, state, count, match, pending = config
            if count >= self._low and self._high - count > horizon:
                return "body", state, -1, match, pending
        return config

    def stop_read(self, config: Config) -> bytes:
        return self._stop_bytes if config[0] == "stop" else b""

    def _complete(self, config: Config) -> bool:
        _, state, count, _, pending = config
        return not pending and (count < 0 or count >= self._low) and class_ends(self._mode, state)

    def _matched(self, match: int, char: str) -> int:
        recent = self._stop[:match] + char
        while not self._stop.startswith(recent):
            recent = recent[1:]
        return len(recent)


class ListLanguage(Language):
    """Texts of other languages, with fixed texts before, around, between and after them.

    `elements` is one language for all elements, or one for each. Configurations: (part, number of complete elements,
    position in the text or configuration of the element).
    """

    def __init__(
        self,
        elements: Tuple[Language, ...],
        is_per_element: bool,
        before: str,
        around: str,
        between: str,
        after: str,
        low: int,
        high: Optional[int],
    ) -> None:
        self._elements, self._is_per_element = elements, is_per_element
        self._before, self._around = before.encode("utf-8"), around.encode("utf-8")
        self._between, self._after = between.encode("utf-8"), after.encode("utf-8")
        self._low, self._high = low, high

    def key(self) -> Tuple[Any, ...]:
        parts = self._before, self._around, self._between, self._after
        return (self._elements, self._is_per_element, *parts, self._low, self._high)

    def first(self) -> Iterator[Config]:
        yield from self._closure(("before", 0, 0))

    def step(self, config: Config, byte: int) -> Iterator[Config]:
        part, done, at = config
        if part == "element":
            for inner in self._element(done).step(at, byte):
                yield from self._closure((part, done, inner))
            return
        text = self._text(part)
        if at < len(text) and text[at] == byte:
            yield from self._closure((part, done, at + 1))

    def accepts(self, config: Config) -> bool:
        part, _, at = config
        return bool(part == "after" and at == len(self._after))

    def canonicalize(self, config: Config, horizon: int) -> Config:
        part, done, at = config
        return (part, done, self._element(done).canonicalize(at, horizon)) if part == "element" else config

    def _element(self, done: int) -> Language:
        return self._elements[min(done, len(self._elements) - 1)] if self._is_per_element else self._elements[0]

    def _text(self, part: str) -> bytes:
        return {"before": self._before, "open": self._around, "close": self._around, "between": self._between}.get(
            part, self._after
        )

    def _closure(self, config: Config) -> Iterator[Config]:
        """Yields the configuration and all configurations that are reachable from it without reading a byte."""
        part, done, at = config
        if part == "element":
            yield config
            element = self._element(done)
            if element.accepts(at):
                yield from self._leave(done, element.stop_read(at))
            return
        if at < len(self._text(part)) or part == "after":
            yield config
            return
        if part == "before":
            if self._high is None or self._high > 0:
                yield from self._closure(("open", 0, 0))
            if self._low == 0:
                yield from self._closure(("after", 0, 0))
        elif part == "between":
            yield from self._closure(("open", done, 0))
        elif part == "open":
            for inner in self._element(done).first():
                yield from self._closure(("element", done, inner))
        else:
            yield from self._next(done, b"")

    def _leave(self, done: int, stop: bytes) -> Iterator[Config]:
        """Yields the configurations after an element. If the stop of the element is also the beginning of the next text, it
        occurs once."""
        if self._around:
            yield from self._closure(("close", done, len(stop) if stop and self._around.startswith(stop) else 0))
        else:
            yield from self._next(done, stop)

    def _next(self, done: int, stop: bytes) -> Iterator[Config]:
        done += 1
        follow = []
        if self._high is None or done < self._high:
            follow.append(("between", self._between))
        if done >= self._low:
            follow.append(("after", self._after))
        if self._high is None:
            done = min(done, max(self._low, 1))
        shared = [part for part, text in follow if stop and text.startswith(stop)]
        for part, _ in follow:
            if not shared:
                yield from self._closure((part, done, 0))
            elif part in shared:
                yield from self._closure((part, done, len(stop)))
