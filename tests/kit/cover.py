"""Which cases of a product run everywhere: few, and among them every value of every parameter, as
long as there is room. PIPEMESH_TEST_ALL runs them all.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations


def chosen(cases: Sequence[Mapping[str, int]], share: int) -> list[int]:
    """Of cases that say which value each parameter has, the numbers of one in `share`.

    Each shows the most values that none before it has shown; where all are shown, the most pairs of
    values. Of equal ones, every `share`-th of the cases is first.
    """
    seen: set[tuple] = set()
    left = dict(enumerate(cases))
    taken: list[int] = []
    for _ in range(-(-len(cases) // share)):
        number = max(
            left,
            key=lambda one: (new(seen, left[one], 1), new(seen, left[one], 2), one % share == 0, -one),
        )
        for size in (1, 2):
            seen |= values(left[number], size)
        taken.append(number)
        del left[number]
    return sorted(taken)


def values(case: Mapping[str, int], size: int) -> set[tuple]:
    return set(combinations(sorted(case.items()), size))


def new(seen: set[tuple], case: Mapping[str, int], size: int) -> int:
    return len(values(case, size) - seen)
