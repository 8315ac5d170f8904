"""The pretend GPU for a process that one with a pretend GPU started; its folder lies on PYTHONPATH."""

import os
import sys

if os.environ.get("PRETEND_GPU"):
    sys.path.append(os.environ["PRETEND_GPU"])
    from pretend.loading import wait_for_torch

    wait_for_torch()
