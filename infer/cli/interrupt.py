"""Ctrl-C while XLA compiles or runs: the call does not return for it, so do not wait for it."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def interruptible(call: Callable[[], T]) -> T:
    """Return `call()`, made in a thread of its own; Ctrl-C raises KeyboardInterrupt here at once.

    After an interrupt the thread still runs: the process must end, without waiting for it.
    """
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["value"] = call()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
