"""Hadamard matrices, +-1 with orthogonal rows, of any size for which one is known here.  No JAX.

    H_n = P_m (x) S_(n / m)

S is Sylvester's matrix of a power of two; P_m is Paley's of m rows, from the squares of a finite
field of q elements: m = q + 1 where q = 3 modulo 4, else m = 2 (q + 1).  576 = 36 * 16,
640 = 20 * 32, 1536 = 12 * 128, 11008 = 344 * 32, 14336 = 28 * 512.

Source: Paley 1933, "On orthogonal matrices".
"""

import functools
import itertools
import math

import numpy as np

# A product with more rows than that is dearer than what it is for.
_MOST_ROWS = 512


def hadamard(size: int) -> np.ndarray:
    """Return the orthonormal matrix float64 [size, size] of `infer.quant.hadamard.transform`."""
    rows = factor(size)
    sylvester = np.ones((1, 1))
    while len(sylvester) < size // rows:
        sylvester = np.kron(np.array([[1, 1], [1, -1]]), sylvester)
    return np.kron(paley(rows), sylvester) / math.sqrt(size)


@functools.cache
def factor(size: int) -> int:
    """Return the rows of Paley's matrix in the transform of `size` numbers, the fewest there are.

    Raises:
        ValueError: no such matrix is known here.
    """
    rows, power = size, 0
    while rows % 2 == 0 and rows:
        rows, power = rows // 2, power + 1
    if rows == 1:
        return 1
    for twos in range(2, power + 1):
        if (m := rows << twos) <= _MOST_ROWS and _field_of(m) is not None:
            return m
    largest = 1 << power
    raise ValueError(
        f"no Hadamard matrix of {size} rows is known here; turn blocks of"
        f" {largest if largest > 1 else 'a power of two'} instead, or leave this weight unturned"
    )


@functools.cache
def paley(rows: int) -> np.ndarray:
    """Return Paley's matrix, int8 [rows, rows] of +-1; 1 is [[1]]."""
    if rows == 1:
        return np.ones((1, 1), np.int8)
    found = _field_of(rows)
    assert found is not None, rows
    q, doubled = found
    core = _jacobsthal(*q)
    size = len(core)
    bordered = np.zeros((size + 1, size + 1), np.int8)
    bordered[1:, 1:] = core
    bordered[0, 1:] = 1
    eye = np.eye(size + 1, dtype=np.int8)
    if not doubled:
        bordered[1:, 0] = -1
        return bordered + eye
    bordered[1:, 0] = 1
    plus, minus = np.array([[1, 1], [1, -1]], np.int8), np.array([[1, -1], [-1, -1]], np.int8)
    return np.kron(bordered, plus) + np.kron(eye, minus)


def _field_of(rows: int) -> tuple[tuple[int, int], bool] | None:
    """Return (prime, exponent) of the field of Paley's matrix, and whether it is the doubled kind;
    None if there is none.
    """
    if (q := _prime_power(rows - 1)) is not None and (rows - 1) % 4 == 3:
        return q, False
    if rows % 4 == 0 and (q := _prime_power(rows // 2 - 1)) is not None and rows // 2 % 4 == 2:
        return q, True
    return None


def _prime_power(q: int) -> tuple[int, int] | None:
    """Return (p, k) with q = p^k, p an odd prime and k up to 3."""
    for k in (1, 2, 3):
        p = round(q ** (1 / k))
        if p**k == q and p > 2 and all(p % d for d in range(2, math.isqrt(p) + 1)):
            return p, k
    return None


def _jacobsthal(p: int, k: int) -> np.ndarray:
    """Return int8 [q, q]: 1 where i - j is a square of the field of q = p^k elements, -1 where it
    is none, 0 where i = j.
    """
    elements = list(itertools.product(range(p), repeat=k))
    modulus = _irreducible(p, k)
    squares = {_times(a, a, p, modulus) for a in elements if any(a)}
    sign = {a: 1 if a in squares else -1 if any(a) else 0 for a in elements}
    minus = lambda a, b: tuple((x - y) % p for x, y in zip(a, b, strict=True))
    return np.array([[sign[minus(a, b)] for b in elements] for a in elements], np.int8)


def _irreducible(p: int, k: int) -> tuple[int, ...]:
    """Return c with x^k = sum c_i x^i irreducible over the field of p elements; k up to 3, where
    having no root is enough.
    """
    if k == 1:
        return (0,)
    for c in itertools.product(range(p), repeat=k):
        value = lambda x, c=c: (x**k - sum(ci * x**i for i, ci in enumerate(c))) % p
        if all(value(x) for x in range(p)):
            return c
    raise AssertionError(f"no irreducible polynomial of degree {k} over {p}")


def _times(a: tuple, b: tuple, p: int, c: tuple[int, ...]) -> tuple[int, ...]:
    """Return the product of two elements, lowest power first, modulo x^k - c."""
    k = len(a)
    if k == 1:
        return (a[0] * b[0] % p,)
    product = [0] * (2 * k - 1)
    for i, j in itertools.product(range(k), repeat=2):
        product[i + j] += a[i] * b[j]
    for top in range(2 * k - 2, k - 1, -1):
        for i in range(k):
            product[top - k + i] += product[top] * c[i]
    return tuple(x % p for x in product[:k])
