"""What rendering a chat template may cost: a budget, and the checks that charge it.

Every loop pass, call and copied or nested item is a step; every character of every text made on the
way counts. A container is charged for all that can be reached through it when it is made, so no
value is ever larger than what was paid for: `x = [x, x]`, forty times, is refused, and so are its
printing and its comparison.
"""

import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, ValuesView
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_STEPS = 4_000_000  # comparing each of 1,000 messages with all others takes a quarter
MAX_CHARS = 1 << 27  # all texts together, the output included
MAX_TEXT = 1 << 24  # one text: four times a context of a million tokens
MAX_ITEMS = 1 << 20  # one list
MAX_INT_BITS = 1 << 12
MAX_SECONDS = 5.0

_ITEMS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class Budget:
    """What one rendering may still do."""

    def __init__(self):
        self._steps = MAX_STEPS
        self._chars = MAX_CHARS
        self._deadline = time.monotonic() + MAX_SECONDS

    def spend(self, *, steps: int = 0, chars: int = 0) -> None:
        """Raise SecurityError when the steps, the characters or the time have run out."""
        self._steps -= steps
        self._chars -= chars
        if self._steps < 0:
            raise SecurityError(f"it takes more than {MAX_STEPS:,} steps")
        if self._chars < 0:
            raise SecurityError(f"it makes more than {MAX_CHARS:,} characters of text")
        if time.monotonic() > self._deadline:
            raise SecurityError(f"it runs for more than {MAX_SECONDS:.0f} s")

    @property
    def steps(self) -> int:
        """The steps that are left."""
        return self._steps


BUDGET: ContextVar[Budget] = ContextVar("BUDGET")


def weigh(value: Any) -> int:
    """Charge what can be reached from `value`, once for every way to reach it; return how much."""
    budget, nodes, pending = BUDGET.get(), 0, [value]
    while pending and nodes <= budget.steps:
        nodes += _open(pending.pop(), pending)
    budget.spend(steps=nodes)
    return nodes


def text_len(value: Any) -> int:
    """Charge the text that `str(value)` makes; return about how long it is."""
    chars, pending = 0, [value]
    while pending and chars <= MAX_TEXT:
        item = pending.pop()
        if isinstance(item, Namespace):
            raise SecurityError("a namespace was printed")
        chars += len(item) if isinstance(item, str) else 4 * _open(item, pending)
    spend_text(chars)
    return chars


def _open(item: Any, pending: list[Any]) -> int:
    """Put what `item` holds on `pending`; return how much that is, itself included."""
    if isinstance(item, dict):
        pending.extend(item)
        pending.extend(item.values())
    elif isinstance(item, _ITEMS):
        pending.extend(item)
    else:
        return 1
    return 1 + len(item)


def spend_text(chars: int) -> None:
    """Charge one text of this length."""
    if chars > MAX_TEXT:
        raise SecurityError(f"a text of more than {MAX_TEXT:,} characters")
    BUDGET.get().spend(chars=max(chars, 0))


def spend_items(count: int) -> None:
    """Charge one list of this length."""
    if count > MAX_ITEMS:
        raise SecurityError(f"a list of more than {MAX_ITEMS:,} items")
    BUDGET.get().spend(steps=max(count, 0))


def as_list(iterable: Iterable[Any]) -> list[Any]:
    """The items of an iterable, charged; what a `for` loops over."""
    if hasattr(iterable, "__len__"):
        spend_items(len(iterable))  # type: ignore[arg-type]
        return list(iterable)
    items = list(iterable)
    spend_items(len(items))
    return items


def check_replace(text: str, old: str, new: str) -> None:
    """Charge `text.replace(old, new)`."""
    spend_text(len(text) + text.count(old) * max(0, len(new) - len(old)))


def check_join(separator: str, items: Any) -> None:
    """Charge `separator.join(items)`."""
    spend_text(text_len(items) + len(separator) * len(items))


def check_text_method(text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Charge a method of a text; return its arguments, with what is iterated made a list."""
    if name == "replace" and len(args) >= 2:
        check_replace(text, str(args[0]), str(args[1]))
    elif name == "join" and args:
        args = (as_list(args[0]),)
        check_join(text, args[0])
    elif "split" in name:
        separator = args[0] if args and isinstance(args[0], str) and args[0] else None
        spend_items(1 + (text.count(separator) if separator else len(text) // 2))
    spend_text(len(text))
    return args


def _check_add(left: Any, right: Any) -> None:
    if isinstance(left, str) and isinstance(right, str):
        spend_text(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        spend_items(len(left) + len(right))
        weigh(right)
        if len(left) < len(right):
            weigh(left)


def _check_multiply(left: Any, right: Any) -> None:
    if isinstance(left, int):
        left, right = right, left
    if not isinstance(right, int):
        return
    if isinstance(left, int) and left.bit_length() + right.bit_length() > MAX_INT_BITS:
        raise SecurityError(f"an integer of more than {MAX_INT_BITS:,} bits")
    if isinstance(left, str | bytes):
        spend_text(len(left) * right)
    if isinstance(left, list | tuple):
        spend_items(len(left) * right)
        BUDGET.get().spend(steps=weigh(left) * max(right, 0))


def _check_power(left: Any, right: Any) -> None:
    both = isinstance(left, int) and isinstance(right, int)
    if both and right > 0 and left.bit_length() * right > MAX_INT_BITS:
        raise SecurityError(f"an integer of more than {MAX_INT_BITS:,} bits")


def _check_modulo(left: Any, right: Any) -> None:
    if isinstance(left, str | bytes):
        raise SecurityError("a text is formatted with %; join the parts with ~")


OPERATORS: dict[str, Callable[[Any, Any], None]] = {
    "+": _check_add,
    "*": _check_multiply,
    "**": _check_power,
    "%": _check_modulo,
}
