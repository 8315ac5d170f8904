"""How far may a measured share be from the true one?"""

from __future__ import annotations

import math


def wilson(share: float, total: float, *, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share counted over ``total`` examples; (0, 1) without any.

        (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    >>> tuple(round(end, 3) for end in wilson(0.5, 100))
    (0.404, 0.596)
    """
    if total <= 0:
        return 0.0, 1.0
    middle = share + z * z / (2 * total)
    reach = z * math.sqrt(max(share * (1 - share), 0.0) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return (middle - reach) / scale, (middle + reach) / scale
