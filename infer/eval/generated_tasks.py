"""Tasks that are made, not read: a needle in a long context, and arithmetic.  Seeded."""

import random
from collections.abc import Sequence
from typing import Any

from infer.errors import RequestError
from infer.eval.tasks import Continuation, Match

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

_CITIES = (
    "Accra Bergen Cusco Dhaka Essen Fukuoka Genoa Hanoi Izmir Jaipur Kigali Lagos Malmo Nagoya "
    "Oslo Perth Quito Riga Sofia Turin Utrecht Vienna Warsaw Xiamen York Zagreb"
).split()


def needle(
    filler: str,
    tokenizer: Any,
    *,
    context: int,
    depths: Sequence[float] = DEPTHS,
    count: int = 20,
    seed: int = 0,
) -> list[Continuation]:
    """Return prompts of about `context` tokens with one fact in them, and a question for it.

    The fact, "The secret number of CITY is NUMBER.", stands between two lines of the filler, as
    near as lines allow to its depth.  Source: Kamradt 2023, needle in a haystack; here
    with a random number of five digits, judged by exact match.

    Args:
        filler: lines of text, more than the context has room for.
        tokenizer: counts the tokens.
        context: tokens of a prompt and its answer; prompts have up to a line's tokens fewer.
        depths: where the fact stands: 0 before all filler, 1 after it.
        count: items of each depth, each with another stretch of the filler, city and number.
        seed: of all that is drawn.

    Raises:
        RequestError: the context has no room, the filler is too short, or a depth is not in [0, 1].
    """
    check_needle(context, depths, count)
    lines = [line for line in filler.split("\n") if line.strip()]
    sizes = [len(tokenizer.encode(line + "\n", add_bos=False)) for line in lines]
    drawn = random.Random(seed)
    items = []
    for depth in depths:
        for _ in range(count):
            city, number = drawn.choice(_CITIES), str(drawn.randint(10_000, 99_999))
            fact = f"The secret number of {city} is {number}.\n"
            question = (
                f"\nQuestion: What is the secret number of {city}?\n"
                f"Answer: The secret number of {city} is"
            )
            room = context - len(tokenizer.encode(fact + question + " " + number)) - 8
            some = _stretch(sizes, room, drawn, context)
            chosen = [lines[i] + "\n" for i in some]
            place = _place([sizes[i] for i in some], depth)
            text = "".join([*chosen[:place], fact, *chosen[place:]])
            items.append(
                Continuation(text + question, number, Match.number, group=f"depth {depth:g}")
            )
    return items


def check_needle(context: int, depths: Sequence[float], count: int) -> None:
    """Refuse needles that no tokenizer can make room for.

    Raises:
        RequestError: a number is out of range.
    """
    if not depths or not all(0 <= d <= 1 for d in depths):
        raise RequestError(f"depths are {list(depths)}; each is from 0 to 1")
    if not 1 <= count <= 100_000:
        raise RequestError(f"count is {count}; give 1 to 100000 items of each depth")
    if context < 32:
        raise RequestError(f"a needle's context of {context} tokens has no room; give 128 or more")


def _stretch(sizes: list[int], room: int, drawn: random.Random, context: int) -> range:
    """Return consecutive lines of at most `room` tokens, from a drawn one on."""
    if room < 0:
        raise RequestError(f"a needle's context of {context} tokens has no room; give 128 or more")
    if sum(sizes) < room:
        raise RequestError(
            f"the filler has {sum(sizes)} tokens, and a needle's context of {context} wants {room};"
            " give a longer text or a smaller context"
        )
    # The last line from which there is enough to the end.
    tail, last = 0, len(sizes)
    while last > 0 and tail < room:
        last -= 1
        tail += sizes[last]
    first = drawn.randint(0, last)
    end, used = first, 0
    while end < len(sizes) and used + sizes[end] <= room:
        used += sizes[end]
        end += 1
    return range(first, end)


def _place(sizes: list[int], depth: float) -> int:
    """Return before which line the share `depth` of the tokens stands, most nearly."""
    total, before = sum(sizes), [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    return min(range(len(before)), key=lambda n: abs(before[n] - depth * total))


def arithmetic(
    *, count: int = 100, digits: int = 2, shots: int = 4, seed: int = 0
) -> list[Continuation]:
    """Return additions and multiplications in turns, after worked examples; exact match.

    Args:
        count: items, half of each kind.
        digits: of the summands, at most; of the factors half as many, rounded up.
        shots: worked examples of the same kind in front of each.
        seed: of all that is drawn; no example is its own question.

    Raises:
        RequestError: a number is out of range.
    """
    for name, value, low, high in (
        ("count", count, 1, 100_000),
        ("digits", digits, 1, 12),
        ("shots", shots, 0, 32),
    ):
        if not low <= value <= high:
            raise RequestError(f"{name} is {value}; it is from {low} to {high}")
    drawn = random.Random(seed)
    items = []
    for nth in range(count):
        kind = ("addition", "multiplication")[nth % 2]
        most = 10 ** (digits if kind == "addition" else -(-digits // 2)) - 1
        seen: list[tuple[int, int]] = []
        while len(seen) <= shots:
            pair = drawn.randint(0, most), drawn.randint(0, most)
            # One-digit factors have a hundred pairs: enough for 32 examples.
            if pair not in seen:
                seen.append(pair)
        *examples, asked = seen
        sign, result = ("+", sum) if kind == "addition" else ("*", lambda p: p[0] * p[1])
        shown = "".join(f"{a} {sign} {b} = {result((a, b))}\n" for a, b in examples)
        prompt = f"{shown}{asked[0]} {sign} {asked[1]} ="
        items.append(Continuation(prompt, str(result(asked)), Match.number, group=kind))
    return items
