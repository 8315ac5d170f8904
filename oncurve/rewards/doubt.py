"""Words by which a text does not commit to what stands beside them, as alternatives of a regular expression.

What a word says depends on where it stands: each reader puts its own bounds around these.
"""

from __future__ import annotations

UNSURE = "maybe|perhaps|possibly|probably"
ROUNDED = "about|approximately|around|roughly|nearly|almost"
BOUNDED = "more than|less than"
