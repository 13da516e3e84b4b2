"""The command `infer`: its subcommands, and the one place that turns errors into exit codes.

Exit codes: 0 done; 1 a failure of ours, or the reader of a pipe went away; 2 bad usage or bad input
(one line on standard error); 130 interrupted.  INFER_DEBUG=1 adds the traceback.
"""

import contextlib
import os
import signal
import sys
import traceback
from typing import Annotated

import typer

from infer.cli import bench, chat, convert, eval, generate, info, models, quantize
from infer.errors import CapacityError

DONE, FAILED, BAD_INPUT, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143

# Not every typer exports it, and not every typer takes it from the same package.
_UsageError = typer.BadParameter.__mro__[1]
# What the caller can put right; every other exception is a failure of ours.
_BAD_INPUT = (
    ValueError,
    CapacityError,
    NotImplementedError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)

app = typer.Typer(
    name="infer",
    help="LLM inference as pure functions in JAX, on GPU and CPU.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("pull")(models.pull)
app.command("models")(models.models)
app.command("info")(info.info)
app.command("convert")(convert.convert)
app.command("quantize")(quantize.quantize)
app.command("bench")(bench.bench)
app.add_typer(eval.app, name="eval")


def _print_version(wanted: bool) -> bool:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"infer {version('infer')}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


def run() -> None:
    """Run the command line of this process and exit."""
    # A closed stream is None: what is written to it must not land in another one.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    with contextlib.suppress(ValueError):  # not in the main thread
        # So that a terminated pull removes its temporary folder.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    code = main(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _broken_pipe()
    if code in (INTERRUPTED, TERMINATED):
        if sys.stderr.isatty():
            print(file=sys.stderr, flush=True)  # below the ^C
        # A program may still be running: Python's orderly end would free memory under it.
        os._exit(code)
    sys.exit(code)


def main(arguments: list[str]) -> int:
    """Run one command line and return its exit code; errors are printed, never raised."""
    try:
        code = app(arguments or ["--help"], prog_name="infer", standalone_mode=False)
        return code if isinstance(code, int) else DONE
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else FAILED
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return _broken_pipe()
    except Exception as error:
        if os.environ.get("INFER_DEBUG") == "1":
            traceback.print_exc()
        code, message = explain(error)
        with contextlib.suppress(OSError):  # standard error is full or gone: the code still counts
            print(f"infer: {message}", file=sys.stderr)
        return code


def explain(error: Exception) -> tuple[int, str]:
    """Return the exit code and the one line that an error is reported by."""
    if isinstance(error, _UsageError):
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "infer"
        message = _line(error.format_message())  # type: ignore[attr-defined]
        # "Value error, ": how the parser's library begins what a type has to say.
        return BAD_INPUT, f"{message.replace('Value error, ', '')} (see {command} --help)"
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename}: {error.strerror}"
    else:
        message = _line(str(error)) or type(error).__name__
    if isinstance(error, _BAD_INPUT):
        return BAD_INPUT, message
    if isinstance(error, OSError):
        return FAILED, message
    return FAILED, f"{type(error).__name__}: {message[:500]} (INFER_DEBUG=1 shows where)"


def _line(text: str) -> str:
    return " ".join(text.split())


def _broken_pipe() -> int:
    """The reader has gone: say nothing, now or when Python flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED
