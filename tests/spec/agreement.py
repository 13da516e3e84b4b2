"""Whether tokens have a known distribution: two tests with a stated rate of false alarms."""

from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What the two tests found."""

    p_value: float  # chi-square
    total_variation: float
    bound: float  # on the total variation

    def holds(self, false_alarms: float) -> bool:
        """Return whether neither test, at half of `false_alarms` each, sees a difference."""
        return self.p_value >= false_alarms / 2 and self.total_variation <= self.bound


def compare(counts: np.ndarray, expected: np.ndarray, *, false_alarms: float) -> Agreement:
    """Compare counts of n independent draws with the probabilities they should have.

    Chi-square, cells of an expected count below 5 taken together.  Total variation, against
    E[TV] + sqrt(log(2 / false_alarms) / 2n): one draw moves TV by at most 1/n (McDiarmid), and
    E[TV] <= sum sqrt(p (1 - p) / n) / 2 (Jensen).  A draw of probability 0 fails both.
    """
    n = int(counts.sum())
    total_variation = 0.5 * float(np.abs(counts / n - expected).sum())
    spread = 0.5 * float(np.sqrt(expected * (1 - expected) / n).sum())
    bound = spread + float(np.sqrt(np.log(2 / false_alarms) / (2 * n)))
    if counts[expected == 0].any():
        return Agreement(p_value=0.0, total_variation=total_variation, bound=-1.0)
    rare = n * expected < 5
    cells = np.append(counts[~rare], counts[rare].sum())
    want = np.append(n * expected[~rare], n * expected[rare].sum())
    cells, want = cells[want > 0], want[want > 0]
    statistic = float(((cells - want) ** 2 / want).sum())
    p_value = float(stats.chi2.sf(statistic, len(cells) - 1))
    return Agreement(p_value=p_value, total_variation=total_variation, bound=bound)
