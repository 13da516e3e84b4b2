"""The peer's side of the pipe: one JSON object a line in, one a line out.

Runs under the peers' Python, so it imports nothing of `infer`.  Between two requests the process
blocks in a read of standard input.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(handlers: dict[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer requests {"op": name, **arguments} until standard input ends.

    An answer is {"ok": true, **result} or {"ok": false, "error": text}.  What libraries print goes
    to standard error: the pipe carries answers only.  The request "memory" is answered here.
    """
    handlers = handlers | {"memory": peak_memory}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        handler = handlers[request.pop("op")]
        try:
            answer = {"ok": True, **handler(**request)}
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def peak_memory() -> dict[str, Any]:
    """Return the most memory that this process had resident (Linux), mapped files included."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return {"peak_bytes": int(line.split()[1]) << 10}
