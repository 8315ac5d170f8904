"""One call of a function in a sandbox, for a value."""

from __future__ import annotations

import time
from typing import Any

from oncurve.sandbox.connection import ChildGone, ChildMisbehaved, ChildSilent
from oncurve.sandbox.inside.codec import NotData, Payload, check
from oncurve.sandbox.instance import Sandbox
from oncurve.sandbox.limits import Limits
from oncurve.sandbox.program_results import TestResult, result_of_end, result_of_failure, result_of_silence


def call(sandbox: Sandbox, job: dict[str, Any], limits: Limits, *, max_bytes: int) -> Payload | TestResult:
    """The result of a function in a fresh process, as data; or why it returned none.

    Raises SandboxDied.
    """
    deadline = time.monotonic() + limits.wall_seconds
    child = sandbox.child(limits=limits)
    try:
        child.connection.send(job, deadline)
        frame = child.connection.receive(deadline, max_bytes)
        if frame["k"] != "return":
            return result_of_failure(frame)
        value = frame.get("value")
        check(value)
        return value
    except NotData as error:
        return TestResult("not_data", str(error))
    except ChildMisbehaved as error:
        return TestResult("too_much_output", str(error))
    except ChildSilent:
        return result_of_silence(child.finish(), limits)
    except ChildGone:
        return result_of_end(child.finish(), limits)
    finally:
        child.finish()
