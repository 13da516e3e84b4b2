"""`infer eval`: perplexity, divergence, comparison and tasks."""

import contextlib
import dataclasses
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from infer.cli.eval_report import (
    compare_lines,
    divergence_lines,
    perplexity_lines,
    task_lines,
)
from infer.cli.interrupt import interruptible
from infer.cli.loading import load_model, use_compilation_cache
from infer.progress import counting_bar

app = typer.Typer(
    help="Measure quality: of one model, or of two beside each other.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_KEYWORD = inspect.Parameter.KEYWORD_ONLY

ModelArgument = Annotated[
    str, typer.Argument(metavar="M", help="A known name, a GGUF file, a folder, or a hub id.")
]
OtherArgument = Annotated[str, typer.Argument(metavar="M2", help="The other model.")]
TextOption = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="A file in UTF-8, or a built-in text: en, te, ja, ru, python-stdlib; may be given "
        "several times [default: en].",
    ),
]
Packed2Option = Annotated[
    bool | None, typer.Option("--packed2/--no-packed2", help="Of M2 [default: as --packed].")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """Options of every command: how models are run, and what is drawn."""

    seed: Annotated[int, typer.Option(help="Of the bootstrap, or of what a task draws.")] = 0
    dtype: Annotated[str | None, typer.Option(help="As in `infer generate`.")] = None
    packed: Annotated[
        bool | None, typer.Option("--packed/--no-packed", help="As in `infer generate`.")
    ] = None
    implementation: Annotated[str | None, typer.Option(help="As in `infer generate`.")] = None

    def check(self) -> None:
        """Refuse what no model can do.

        Raises:
            ConfigError, RequestError: a value is out of range.
        """
        from infer.eval.windows import check_seed
        from infer.model import checked_dtype
        from infer.ops.choice import check_implementation

        check_seed(self.seed)
        check_implementation(self.implementation)
        if self.dtype is not None:
            checked_dtype(self.dtype)

    def load(self, named: Sequence[tuple[str, bool | None]]) -> list[Any]:
        """Return the loaded models; one that is named twice is loaded once."""
        found: dict[tuple[str, bool | None], Any] = {}
        for name, packed in named:
            if (name, packed) not in found:
                found[name, packed] = load_model(
                    name, self.dtype, packed, self.implementation, beside=bool(found)
                )[0]
        return [found[each] for each in named]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(Running):
    """Options of what is measured on texts."""

    text: TextOption = None
    context: Annotated[int, typer.Option(help="Tokens of a window.")] = 512
    windows: Annotated[
        int | None, typer.Option(help="The first ones of each text, at most [default: all].")
    ] = None
    scored: Annotated[
        str, typer.Option(help="second_half of each window, as llama.cpp does, or all of it.")
    ] = "second_half"
    allow_overlap: Annotated[
        bool,
        typer.Option("--allow-overlap", help="Evaluate on text that calibrated a model, too."),
    ] = False
    kv_dtype: Annotated[str | None, typer.Option(help="As in `infer generate`.")] = None

    def check(self) -> None:
        """Refuse what no model can do, bad texts included."""
        from infer.cache.pool import kv_dtype_name
        from infer.eval.windows import check_scored, check_window

        super().check()
        check_window(self.context, self.windows)
        check_scored(self.scored)
        kv_dtype_name(self.kv_dtype)

    def options(self) -> dict[str, Any]:
        """Return the keywords of `infer.eval`'s measures."""
        names = ("context", "windows", "scored", "seed", "allow_overlap", "implementation")
        return {name: getattr(self, name) for name in names} | {"kv_dtype": self.kv_dtype}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paired(Measured):
    """Options of what is measured of two models."""

    control: Annotated[
        bool,
        typer.Option(
            "--control", help="Also run each model against itself: ratio 1, KL 0, exactly."
        ),
    ] = False
    packed2: Packed2Option = None
    kv_dtype2: Annotated[
        str | None, typer.Option(help="Of M2's cache [default: as --kv-dtype].")
    ] = None

    def check(self) -> None:
        """Refuse what no model can do, bad texts included."""
        from infer.cache.pool import kv_dtype_name

        super().check()
        kv_dtype_name(self.kv_dtype2)

    def options(self) -> dict[str, Any]:
        """Return the keywords of `infer.eval`'s measures of two models."""
        pair = (self.kv_dtype, self.kv_dtype2 or self.kv_dtype)
        return super().options() | {"kv_dtype": pair}

    def of_other(self) -> bool | None:
        """Return how M2's weights are held."""
        return self.packed if self.packed2 is None else self.packed2


def takes(kind: type[Running]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of `kind`, after its own, as one checked argument `asked`."""
    hints = get_type_hints(kind, include_extras=True)
    shared = [
        inspect.Parameter(f.name, _KEYWORD, default=f.default, annotation=hints[f.name])
        for f in dataclasses.fields(kind)
    ]

    def change(command: Callable[..., Any]) -> Callable[..., Any]:
        given = inspect.signature(command, eval_str=True).parameters.values()
        own = [p for p in given if p.name != "asked"]

        def run(**values: Any) -> Any:
            use_compilation_cache()  # before JAX is there
            asked = kind(**{p.name: values.pop(p.name) for p in shared})
            asked.check()
            return command(**values, asked=asked)

        parameters = [p.replace(kind=_KEYWORD) for p in (*own, *shared)]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return change


@app.command()
@takes(Measured)
def perplexity(model: ModelArgument, as_json: JsonOption = False, *, asked: Measured) -> None:
    """Print the perplexity of texts under a model, with 95% intervals."""
    texts = read_texts(asked.text)
    (loaded,) = asked.load([(model, asked.packed)])
    from infer import eval as measures

    options = asked.options()
    found = _run(lambda progress: measures.perplexity(loaded, texts, **options, progress=progress))
    _print({"measure": "perplexity", "model": model, **found.to_json()}, as_json, perplexity_lines)


@app.command()
@takes(Paired)
def divergence(
    model: Annotated[str, typer.Argument(metavar="M", help="The base: what M2 is meant to be.")],
    other: OtherArgument,
    as_json: JsonOption = False,
    *,
    asked: Paired,
) -> int:
    """Print how far M2 is from M: KL divergence, agreement of the likeliest token, perplexity
    ratio.
    """
    texts, options = read_texts(asked.text), asked.options()
    loaded = asked.load([(model, asked.packed), (other, asked.of_other())])
    pair = loaded[0], loaded[1]
    from infer import eval as measures

    found = _run(lambda progress: measures.divergence(*pair, texts, **options, progress=progress))
    report = {"measure": "divergence", "base": model, "model": other, **found.to_json()}
    code = _controlled(report, loaded, texts, options) if asked.control else 0
    _print(report, as_json, divergence_lines)
    return code


@app.command()
@takes(Paired)
def compare(
    model: ModelArgument,
    other: OtherArgument,
    base: Annotated[
        str | None, typer.Option(help="What both are meant to be; compares divergences from it.")
    ] = None,
    as_json: JsonOption = False,
    *,
    asked: Paired,
) -> int:
    """Say whether M2 is better than M on these texts, by a bootstrap paired by window."""
    texts, options = read_texts(asked.text), asked.options()
    named = [(model, asked.packed), (other, asked.of_other())]
    if base is not None:
        options["kv_dtype"] += (asked.kv_dtype,)
        named.append((base, asked.packed))
    loaded = asked.load(named)
    from infer import eval as measures

    pair, reference = (loaded[0], loaded[1]), loaded[2] if base is not None else None
    found = _run(
        lambda progress: measures.compare(
            *pair, texts, base=reference, **options, progress=progress
        )
    )
    report = {"measure": "compare", "a": model, "b": other, "base": base, **found.to_json()}
    code = _controlled(report, loaded, texts, options) if asked.control else 0
    _print(report, as_json, compare_lines)
    return code


@app.command()
@takes(Running)
def tasks(
    model: ModelArgument,
    other: Annotated[
        str | None, typer.Argument(metavar="[M2]", help="Answers the same items.")
    ] = None,
    *,
    task: Annotated[str, typer.Option(help="needle, arithmetic, or a JSON lines file.")],
    items: Annotated[
        int | None,
        typer.Option(help="Of arithmetic in all, of needle for each depth [default: 100, 20]."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of a needle's prompt [default: 512].")
    ] = None,
    depths: Annotated[
        str | None,
        typer.Option(help="Of the needle, 0 to 1, by commas [default: 0,0.25,0.5,0.75,1]."),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Around the needle: a file or a built-in text [default: en].")
    ] = None,
    digits: Annotated[
        int | None, typer.Option(help="Of arithmetic's summands [default: 2].")
    ] = None,
    shots: Annotated[int | None, typer.Option(help="Worked examples [default: 4].")] = None,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="Log-likelihood of a choice over its bytes.")
    ] = False,
    packed2: Packed2Option = None,
    as_json: JsonOption = False,
    asked: Running,
) -> None:
    """Print how many items of a task a model gets right; of two, whether they differ (McNemar)."""
    given = {
        "--items": items,
        "--context": context,
        "--depths": depths,
        "--text": text,
        "--digits": digits,
        "--shots": shots,
        "--normalize": normalize or None,
    }
    belong = {
        "needle": ("--items", "--context", "--depths", "--text"),
        "arithmetic": ("--items", "--digits", "--shots"),
    }.get(task, ("--normalize",))
    for name, value in given.items():
        if value is not None and name not in belong:
            raise ValueError(f"{name} does not go with --task {task}, which takes {_list(belong)}")
    if other is None and packed2 is not None:
        raise ValueError(
            "--packed2 is of M2, and one model is given; name another, or leave it out"
        )
    make = _items_of(task, given, asked.seed)
    named = [(model, asked.packed)]
    if other is not None:
        named.append((other, asked.packed if packed2 is None else packed2))
    loaded = asked.load(named)
    from infer.eval.tasks import run_task

    todo = make(loaded[0].tokenizer)
    found = _run(
        lambda progress: run_task(
            task,
            todo,
            loaded,
            normalize=normalize,
            implementation=asked.implementation,
            progress=progress,
        ),
        "items",
    )
    names = {"model": model} | ({} if other is None else {"other": other})
    _print({"measure": "tasks", **names, **found.to_json()}, as_json, task_lines)


def _items_of(task: str, given: dict[str, Any], seed: int) -> Callable[[Any], Any]:
    """Return what makes a task's items from a tokenizer; a bad file is told at once."""
    from infer.eval import generated_tasks
    from infer.eval.tasks import read_items
    from infer.eval.texts import read_text

    if task == "needle":
        filler = read_text("en" if given["--text"] is None else given["--text"])
        depths = depths_of(given["--depths"])
        count, context = given["--items"], given["--context"]
        context = 512 if context is None else context
        count = 20 if count is None else count
        generated_tasks.check_needle(context, depths, count)
        return lambda tokenizer: generated_tasks.needle(
            filler,
            tokenizer,
            context=context,
            depths=depths,
            count=count,
            seed=seed,
        )
    if task == "arithmetic":
        defaults = {"count": 100, "digits": 2, "shots": 4}
        asked = (given["--items"], given["--digits"], given["--shots"])
        chosen = {k: d if x is None else x for (k, d), x in zip(defaults.items(), asked)}  # noqa: B905
        items = generated_tasks.arithmetic(**chosen, seed=seed)
        return lambda _: items
    if not Path(task).is_file():
        raise ValueError(f"--task is {task!r}: neither needle nor arithmetic nor a file")
    items = read_items(Path(task))
    return lambda _: items


def depths_of(text: str | None) -> tuple[float, ...]:
    """Return the numbers of `--depths`.

    Raises:
        ValueError: one is no number from 0 to 1.
    """
    from infer.eval.generated_tasks import DEPTHS

    if text is None:
        return DEPTHS
    try:
        depths = tuple(float(part) for part in text.split(","))
    except ValueError:
        depths = ()
    if not depths or not all(0 <= d <= 1 for d in depths):
        raise ValueError(f"--depths is {text!r}; give numbers from 0 to 1, such as 0,0.5,1")
    return depths


def read_texts(names: list[str] | None) -> dict[str, str]:
    """Return the texts of `--text` by name.

    Raises:
        ValueError: one is given twice, or is no text.
    """
    from infer.eval.texts import read_text

    names = names or ["en"]
    if len(set(names)) < len(names):
        raise ValueError(f"--text is {_list(names)}; give each text once")
    return {name: read_text(name) for name in names}


def _run(call: Callable[[Any], Any], what: str = "windows") -> Any:
    """Return what `call` does with a bar on a terminal; the total comes with the first report."""
    with contextlib.ExitStack() as stack:
        bars: list[Any] = []

        def report(done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(counting_bar(what, total)))
            if bars[0] is not None:
                bars[0](done)

        return interruptible(lambda: call(report))


def _controlled(report: dict[str, Any], loaded: list[Any], texts: Any, options: Any) -> int:
    """Add the identity control of each model; return 1 if one is not exact."""
    from infer import eval as measures

    # Each with its own cache, which is a part of what was measured.
    pairs = zip(loaded, options["kv_dtype"], strict=True)
    different = {(id(model), kv_dtype): model for model, kv_dtype in pairs}
    found = [
        measures.control(model, texts, **(options | {"kv_dtype": kv_dtype}))
        for (_, kv_dtype), model in different.items()
    ]
    report["controls"] = [x.to_json() for x in found]
    return 0 if all(x.exact for x in found) else 1


def _print(
    report: dict[str, Any], as_json: bool, lines: Callable[[dict[str, Any]], list[str]]
) -> None:
    print(json.dumps(report, allow_nan=False) if as_json else "\n".join(lines(report)))


def _list(names: Any) -> str:
    return ", ".join(names)
