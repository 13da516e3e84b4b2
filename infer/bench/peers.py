"""Peers as long-lived processes: started once, asked in turns, silent in between."""

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infer.bench.machine import busy_cores

_SCRIPTS = Path(__file__).resolve().parent / "peer_side"

# OpenMP workers that sleep between steps: measured as fast as spinning ones for llama.cpp, whose
# barriers are its own; torch would lose a fifth to a third.
_SLEEPING = {"peer_llama_cpp.py": {"OMP_WAIT_POLICY": "passive"}}

# What `--against` can name -> (script, the peer's dtype, label).
KINDS = {
    "llama.cpp": [("peer_llama_cpp.py", None, "llama.cpp")],
    "transformers": [
        ("peer_transformers.py", "float32", "transformers f32"),
        ("peer_transformers.py", "bfloat16", "transformers bf16"),
    ],
}

# What an operation counts beside its seconds and tokens.
_COUNTS = {"speculate": ("drafted", "accepted", "row_passes")}

# Cores that other work may take while engines are compared; more is a busy machine.
QUIET_CORES = 0.2

# Seconds that one answer may take: large models load, and long prompts are read, for minutes.
TIMEOUT_S = 900.0
# Characters of one answer; the largest, tokens of a batch, have thousands.
_MOST_ANSWER = 64 << 20
# Seconds that a peer has to end by itself when its input is closed.
_GRACE_S = 10.0


class PeerError(ChildProcessError):
    """A peer cannot be started, is silent, or has answered with an error or with nonsense."""


class NoPeersError(ValueError):
    """There is no environment of peers where one was looked for."""


@dataclass
class Peer:
    """One peer's process.

    Attributes:
        label: its name in reports.
        process: in a process group of its own.
        timeout_s: seconds that one answer may take.
        start_s: from starting the process to the loaded model, imports included.
        load_s: of the model alone.
        info: what it says about itself.
        version: of the library.
        details: what else tells how it was built and how it runs.
    """

    label: str
    process: subprocess.Popen
    timeout_s: float = TIMEOUT_S
    start_s: float = 0.0
    load_s: float = 0.0
    info: str = ""
    version: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(
        cls,
        python: Path,
        script: str,
        dtype: str | None,
        label: str,
        path: Path,
        threads: int,
        timeout_s: float = TIMEOUT_S,
    ) -> "Peer":
        """Start the process and load the model; a process that fails at it is ended.

        Raises:
            PeerError: it does not start, or `ask` says why not.
        """
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        environment |= _SLEEPING.get(script, {})
        begin = time.perf_counter()
        try:
            process = subprocess.Popen(
                [str(python), str(_SCRIPTS / script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # a group of its own, which can be ended as one
            )
        except OSError as error:
            raise PeerError(
                f"{label}: {python} cannot be run ({error.strerror or error}); make the peers' "
                "environment anew with scripts/peers.sh"
            ) from None
        peer = cls(label, process, timeout_s)
        try:
            options = {} if dtype is None else {"dtype": dtype}
            answer = peer.ask("load", path=str(path), threads=threads, **options)
            peer.start_s = time.perf_counter() - begin
            peer.load_s = peer._seconds("load", answer, "load_s")
            peer.info, peer.version = (peer._text(answer, name) for name in ("info", "version"))
            details = answer.get("details", {})
            if not isinstance(details, dict):
                raise peer._nonsense("load", f"'details' is {details!r:.80}, not an object")
            peer.details = details
        except BaseException:
            peer.kill()
            peer.close()
            raise
        return peer

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send one request and return its answer.

        Raises:
            PeerError: the process has ended, does not answer within `timeout_s` seconds, or
                answers with an error or with no JSON object.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        request = json.dumps({"op": op, **arguments}) + "\n"
        line = b""
        with self._limited() as is_late:
            # A process that has ended breaks the pipe.
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(request.encode())
                self.process.stdin.flush()
                line = self.process.stdout.readline(_MOST_ANSWER)
        if is_late():
            raise PeerError(
                f"{self.label} has not answered {op!r} within {self.timeout_s:g} s and was ended; "
                "give it longer (infer bench --peer-timeout), or a smaller case"
            )
        if not line:
            raise PeerError(
                f"{self.label} ended with status {self._status()}; run "
                f"{shlex.join(map(str, self._command()))} by hand to see why"
            )
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            raise self._nonsense(op, f"it says {line[:80]!r}") from None
        if not isinstance(answer, dict) or not isinstance(answer.get("ok"), bool):
            raise self._nonsense(op, f"it says {line[:80]!r}")
        if not answer.pop("ok"):
            error = str(answer.get("error", "an error without a word"))
            raise PeerError(f"{self.label}: {error[:500]}")
        return answer

    def generate(
        self, prompts: list[list[int]], new_tokens: int, reuse: bool = False
    ) -> dict[str, Any]:
        """Return the peer's `ttft_s`, `decode_s` and `tokens` for a batch, checked.

        Raises:
            PeerError: as of `ask`, or these are not what was asked for.
        """
        more = {"reuse": True} if reuse else {}
        return self._generated("generate", prompts, new_tokens, more)

    def speculate(self, prompts: list[list[int]], new_tokens: int, k: int) -> dict[str, Any]:
        """Return the same of a peer that drafts up to `k` tokens a row by prompt lookup, and its
        counts `drafted`, `accepted` and `row_passes`.  0 is plain decoding; prompts may differ in
        length.

        Raises:
            PeerError: as of `generate`; a peer without speculation says so.
        """
        return self._generated("speculate", prompts, new_tokens, {"k": k})

    def _generated(
        self, op: str, prompts: list[list[int]], new_tokens: int, more: dict[str, Any]
    ) -> dict[str, Any]:
        answer = self.ask(op, prompts=prompts, new_tokens=new_tokens, **more)
        tokens = answer.get("tokens")
        if not (
            isinstance(tokens, list)
            and len(tokens) == len(prompts)
            and all(isinstance(row, list) and len(row) == new_tokens for row in tokens)
            and all(type(token) is int for row in tokens for token in row)
        ):
            raise self._nonsense(op, f"'tokens' are not {len(prompts)} rows of {new_tokens} ids")
        return {
            "ttft_s": self._seconds(op, answer, "ttft_s", above_0=True),
            "decode_s": self._seconds(op, answer, "decode_s", above_0=new_tokens > 1),
            "tokens": tokens,
            **{name: self._count(op, answer, name) for name in _COUNTS.get(op, ())},
        }

    def _nonsense(self, op: str, what: str) -> PeerError:
        return PeerError(
            f"{self.label} has answered {op!r} with what is no answer: {what}; its script must "
            f"speak the protocol of {_SCRIPTS / 'peer_protocol.py'}"
        )

    def _seconds(self, op: str, answer: dict[str, Any], name: str, above_0: bool = False) -> float:
        value = answer.get(name)
        seconds = math.nan
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):
                seconds = float(value)
        if not 0 <= seconds < math.inf or (above_0 and seconds == 0):
            raise self._nonsense(op, f"{name!r} is {value!r:.80}, not a number of seconds")
        return seconds

    def _count(self, op: str, answer: dict[str, Any], name: str) -> int:
        value = answer.get(name)
        if type(value) is not int or value < 0:
            raise self._nonsense(op, f"{name!r} is {value!r:.80}, not a count")
        return value

    def _text(self, answer: dict[str, Any], name: str) -> str:
        value = answer.get(name)
        if not isinstance(value, str):
            raise self._nonsense("load", f"{name!r} is {value!r:.80}, not a string")
        return value

    @contextlib.contextmanager
    def _limited(self) -> Iterator[Callable[[], bool]]:
        """End the process if the block takes longer than `timeout_s`; gives whether it did."""
        late = threading.Event()

        def end() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(self.timeout_s, end)
        timer.daemon = True
        timer.start()
        try:
            yield late.is_set
        finally:
            timer.cancel()

    def _status(self) -> int | str:
        """Return the exit status of a process that has closed its output."""
        try:
            return self.process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            return "unknown: it has closed its output and runs on"

    def _command(self) -> list[str]:
        args = self.process.args
        return args if isinstance(args, list) else [str(args)]  # type: ignore[return-value]

    def settle(self, most_s: float = 2.0) -> float:
        """Wait until the process burns no more CPU; return the seconds that took.

        OpenMP workers spin for a while after a step: a peer's turn ends when they sleep.
        """
        begin = time.perf_counter()
        before = _cpu_seconds(self.process.pid)
        while time.perf_counter() - begin < most_s:
            time.sleep(0.1)
            now = _cpu_seconds(self.process.pid)
            if now - before < 0.005:
                break
            before = now
        return time.perf_counter() - begin

    def idle_cpu_share(self, seconds: float = 0.5) -> float:
        """Return the share of one core that the waiting process takes; 0 is what it should be."""
        before = _cpu_seconds(self.process.pid)
        time.sleep(seconds)
        return (_cpu_seconds(self.process.pid) - before) / seconds

    def kill(self) -> None:
        """End the process and all that it has started, at once."""
        if self.process.returncode is None:  # not waited for, so that the number is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process by closing its input, or by force where that is not enough."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()
        self.process.stdout.close()


def python_of(folder: Path) -> Path:
    """Return the interpreter of the peers' environment.

    Raises:
        NoPeersError: there is none in `folder`.
    """
    python = folder / "bin" / "python"
    if not os.path.exists(python):  # not Path.exists, which raises where nothing may be seen
        raise NoPeersError(
            f"{folder} has no environment of peers; in a checkout of the sources run: bash "
            f"scripts/peers.sh {folder}"
        )
    return python


def _cpu_seconds(pid: int) -> float:
    """Return user and system time of all threads of a process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(patience: float) -> float:
    """Wait up to `patience` seconds for an idle machine; return the cores busy at the end."""
    end = time.perf_counter() + patience
    while (busy := busy_cores()) > QUIET_CORES and time.perf_counter() < end:
        time.sleep(1.0)
    return busy
