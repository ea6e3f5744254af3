"""Logits of one step: float32 of shape (1, vocabulary), shared with the server, writable in place."""

from __future__ import annotations

import heapq
import importlib
import math
import operator
from array import array
from typing import Any, Iterator, List, Optional, Tuple

_numpy: Any = None


def numpy() -> Any:
    """Returns the numpy module, or None if it is not installed."""
    global _numpy
    if _numpy is None:
        try:
            _numpy = importlib.import_module("numpy")
        except ImportError:
            _numpy = False
    return _numpy or None


class Tensor:
    """Replacement for `max.driver.Tensor`, with `from_numpy` and `to_numpy`."""

    def __init__(self, values: Any) -> None:
        self._values = values

    @classmethod
    def from_numpy(cls, values: Any) -> Tensor:
        """Creates a tensor from an array of shape (1, vocabulary)."""
        return cls(values)

    def to_numpy(self) -> Any:
        """Returns the array."""
        return self._values

    @property
    def shape(self) -> Any:
        """Shape: (1, vocabulary)."""
        return getattr(self._values, "shape", None)


class Logits:
    """Logits of one step: `logits[token]` reads and writes one entry; `to_numpy()` returns a view of all.

    A view of shared memory, valid only during the call; copy values that are needed later.
    """

    def __init__(self, view: Any) -> None:
        self._view = view  # memoryview, one dimension, format "f"
        self.maybe_written = False  # True if the mod may have written to it

    @property
    def shape(self) -> Tuple[int, int]:
        """Shape: (1, vocabulary)."""
        return (1, len(self._view))

    def __len__(self) -> int:
        return len(self._view)

    def __iter__(self) -> Iterator[float]:
        return iter(self._view)

    def __getitem__(self, token: Any) -> float:
        return float(self._view[self._index(token)])

    def __setitem__(self, token: Any, value: float) -> None:
        self.maybe_written = True
        self._view[self._index(token)] = value

    @staticmethod
    def _index(token: Any) -> Any:
        if isinstance(token, tuple):
            row, token = token
            if row != 0:
                raise IndexError("logits have only row 0")
        return token

    def keep_only(self, tokens: Any, others: float = -math.inf) -> None:
        """Sets all logits except those of these token ids to `others`, in place. `tokens` is any iterable. An id that is not
        in the vocabulary raises IndexError."""
        index = self._checked_ids(tokens)
        self.maybe_written = True
        np = numpy()
        if np is not None:
            values = np.frombuffer(self._view, dtype=np.float32)
            kept = values[index]
            values.fill(others)
            values[index] = kept
            return
        view = self._view
        kept = [view[token] for token in index]
        view[:] = memoryview(array("f", [others]) * len(view))
        for token, value in zip(index, kept):
            view[token] = value

    def _checked_ids(self, tokens: Any) -> Any:
        """Returns token ids, or a matrix of one row, as a numpy array, or as a list without numpy."""
        np = numpy()
        sequences = (list, tuple, array) if np is None else (list, tuple, array, np.ndarray)
        if not isinstance(tokens, sequences):
            tokens = list(tokens)
        if len(tokens) == 1 and isinstance(tokens[0], sequences):
            tokens = tokens[0]
        if np is not None:
            try:
                index = np.asarray(tokens)
            except ValueError:  # rows of different lengths
                index = None
            if index is not None and index.ndim == 1 and index.size and index.dtype.kind in "iu":
                for token in (index.min(), index.max()):
                    self._check_id(int(token))
                return index.astype(np.int64)
        ids = [operator.index(token) for token in tokens]
        for token in ids:
            self._check_id(token)
        return ids if np is None else np.array(ids, dtype=np.int64)

    def _check_id(self, token: int) -> None:
        if not 0 <= token < len(self._view):
            raise IndexError("token %d is not in the vocabulary; ids must be from 0 to %d" % (token, len(self._view) - 1))

    def to_numpy(self) -> Any:
        """Returns a writable view: a numpy array of shape (1, vocabulary), or a memoryview of that shape without numpy."""
        self.maybe_written = True
        np = numpy()
        if np is not None:
            return np.frombuffer(self._view, dtype=np.float32).reshape(1, -1)
        return self._view.cast("B").cast("f", shape=[1, len(self._view)])

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        values = self.to_numpy()
        return values if dtype is None else values.astype(dtype)

    def copy(self) -> Logits:
        """Returns an independent copy, which remains valid after the call."""
        return Logits(memoryview(array("f", self._view)))

    def tolist(self) -> List[List[float]]:
        """Returns a copy as [[…]], of shape (1, vocabulary)."""
        return [self._view.tolist()]

    def log_sum_exp(self) -> float:
        """Returns the natural logarithm of the sum of exp(logit); a token's log-probability is its logit minus this."""
        np = numpy()
        if np is not None:
            values = np.frombuffer(self._view, dtype=np.float32)
            highest = float(values.max())
            return highest + math.log(float(np.exp(values - highest).sum()))
        highest = float(max(self._view))
        return highest + math.log(math.fsum(math.exp(value - highest) for value in self._view))

    def top(self, k: int) -> List[Tuple[int, float]]:
        """Returns the k most probable tokens as [(token, probability), …], highest first."""
        total = self.log_sum_exp()
        return [(token, math.exp(value - total)) for token, value in self._highest(k)]

    def entropy(self) -> float:
        """Returns the entropy of the distribution in bits."""
        total = self.log_sum_exp()
        np = numpy()
        if np is not None:
            logprobs = np.frombuffer(self._view, dtype=np.float32) - np.float32(total)
            weights = np.exp(logprobs)
            logprobs[weights == 0] = 0  # -inf times 0 is NaN
            return max(0.0, -float((weights * logprobs).sum()) / math.log(2))
        logprobs = (value - total for value in self._view)
        return max(0.0, -math.fsum(math.exp(lp) * lp for lp in logprobs if lp > -700) / math.log(2))

    def _highest(self, k: int) -> List[Tuple[int, float]]:
        k = min(int(k), len(self._view))
        if k <= 0:
            return []
        np = numpy()
        if np is not None:
            values = np.frombuffer(self._view, dtype=np.float32)
            found = np.argpartition(values, -k)[-k:]
            found = found[np.argsort(-values[found], kind="stable")]
            return [(int(token), float(values[token])) for token in found]
        return heapq.nlargest(k, enumerate(self._view), key=lambda entry: entry[1])


def top_k_logprob(logits: Any, k: int) -> Tuple[Any, Any]:
    """Returns (natural log-probabilities, token ids) of the k most probable tokens, each of shape (1, k), highest first:
    numpy arrays if numpy is installed, else lists of lists."""
    if not isinstance(logits, Logits):
        values = logits.to_numpy() if hasattr(logits, "to_numpy") else logits
        logits = Logits(memoryview(flat(values)))
    total = logits.log_sum_exp()
    highest = logits._highest(k)
    logprobs, tokens = [value - total for _, value in highest], [token for token, _ in highest]
    np = numpy()
    if np is not None:
        return np.array([logprobs], dtype=np.float32), np.array([tokens], dtype=np.int64)
    return [logprobs], [tokens]


def flat(values: Any) -> Any:
    """Converts a row of numbers, or a matrix of one row, to a flat buffer of float32."""
    np = numpy()
    if np is not None:
        return np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    if isinstance(values, memoryview):
        return values.cast("B").cast("f") if values.format == "f" else array("f", values.cast("B").cast(values.format))  # type: ignore[call-overload]
    if isinstance(values, array):
        return values if values.typecode == "f" else array("f", values)
    values = values.tolist() if hasattr(values, "tolist") else values
    if len(values) == 1 and hasattr(values[0], "__len__"):
        values = values[0]
    return array("f", values)
