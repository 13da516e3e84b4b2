"""`infer bench`: tokens/s of this machine, alone or in turns with peers on the same file, or with a
drafter.
"""

import enum
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from infer.bench.cases import TEXT, DecodeCase
from infer.cli.drafting import check_draft, drafter_of
from infer.cli.loading import load_model, use_compilation_cache
from infer.cli.options import KVDtypeOption, value_of

_PEERS = ("llama.cpp", "transformers")
_PREFILL_TOKENS = 512


class What(enum.StrEnum):
    """What is measured."""

    decode = "decode"
    prefill = "prefill"
    spec = "spec"


def bench(
    what: Annotated[
        What,
        typer.Argument(
            help="decode measures the prefill of 512 tokens too; spec what a drafter brings."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="As in `infer generate`; for peers a known name or a GGUF file."
        ),
    ] = "smollm2-135m",
    against: Annotated[
        str, typer.Option(help=f"Peers in turns with ours, of {', '.join(_PEERS)}.")
    ] = "",
    batch: Annotated[
        str | None, typer.Option(help="Sequences at once [default: 1,8,32; of prefill and spec 1].")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each sequence [default: 32; of prefill 512].")
    ] = None,
    new_tokens: Annotated[
        int | None,
        typer.Option(
            min=2, help="That decode and spec make of each sequence [default: 64; of spec 96]."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="That count; one before warms up.")] = 3,
    threads: Annotated[
        int | None, typer.Option(help="Cores that every engine may use [default: all].")
    ] = None,
    peers: Annotated[
        Path, typer.Option(help="The peers' environment (scripts/peers.sh makes it).")
    ] = Path(".venv-peers"),
    peer_timeout: Annotated[
        float, typer.Option(help="Seconds that one answer of a peer may take, 1 to 86400.")
    ] = 900,
    kv_dtype: KVDtypeOption = None,
    draft: Annotated[
        str | None, typer.Option(metavar="DRAFTER", help="Of spec, as for infer generate.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure decode or prefill speed: greedy, past end-of-sequence ids, medians over rounds.

    Every engine gets the same file, cores and prompt ids, and answers in turn.  bandwidth_fraction
    is the bytes of a decode step at batch 1 (packed weights, cached keys and values) over its time,
    over the bandwidth at which all threads read 512 MB of memory.  --kv-dtype is that of our cache;
    the result states each engine's.  What goes on is told on standard error.

    spec measures how many drafts stand (alpha) and what a draft step and the pass over all drafts
    cost (c and v, in plain steps), predicts the speed-up from these, and measures it.
    """
    if (draft is None) == (what is What.spec):
        raise ValueError(
            "--draft goes with spec, and spec needs it: infer bench spec --draft ngram"
        )
    if not 1 <= peer_timeout <= 86400:
        raise ValueError(f"--peer-timeout is {peer_timeout:g}; give seconds from 1 to 86400")
    kinds = peer_names(against)
    if draft is not None:
        if kinds or prompt_tokens is not None or kv_dtype is not None:
            raise ValueError(
                "--against, --prompt-tokens and --kv-dtype go with decode and prefill; spec has "
                "its own prompts, and the cache the activations' dtype"
            )
        bench_spec(model, draft, batch, new_tokens, rounds, threads, as_json)
        return
    cases = cases_of(what, batch, prompt_tokens, new_tokens)
    use_compilation_cache()
    # Cores first: JAX starts its threads when it is imported.
    from infer.bench.machine import use_threads

    cores = use_threads(threads)
    found = measured(model, kinds, cases, rounds, cores, peers, peer_timeout, value_of(kv_dtype))
    found = {"benchmark": what.value, **found}
    if as_json:
        print(json.dumps(found))
        return
    from infer.bench.compare import text_of

    print(text_of(found))


def bench_spec(
    model: str,
    draft: str,
    batch: str | None,
    new_tokens: int | None,
    rounds: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure a model with a drafter and print the figures."""
    sizes = batch_sizes("1" if batch is None else batch)
    check_draft(draft)
    use_compilation_cache()
    from infer.bench.machine import busy_cores, cpu_name, use_threads

    cores = use_threads(threads)
    from infer.bench import speculation

    busy = busy_cores()
    say(f"loads {model}")
    loaded, _ = load_model(model)
    drafter = drafter_of(draft, loaded)
    prompts = [loaded.tokenizer.encode(text) for text in speculation.PROMPTS.values()]
    found = {
        "benchmark": What.spec.value,
        "model": model,
        "draft": draft,
        "drafter": str(drafter),
        "cpu": cpu_name(),
        "threads": cores,
        "rounds": rounds,
        "busy_cores": busy,
        "results": [
            speculation.measure(
                loaded.params,
                prompts,
                drafter,
                batch=size,
                new_tokens=96 if new_tokens is None else new_tokens,
                rounds=rounds,
                say=say,
            )
            for size in sizes
        ],
    }
    print(json.dumps(found, allow_nan=False) if as_json else speculation.text_of(found))


def measured(
    model: str,
    kinds: list[str],
    cases: list[DecodeCase],
    rounds: int,
    threads: int,
    folder: Path,
    timeout_s: float,
    kv_dtype: str | None,
) -> dict[str, Any]:
    """Return all figures, with the model's name and our load time."""
    from infer.bench import compare
    from infer.bench.peers import python_of
    from infer.generation.prepare import RunOptions

    # What can be wrong is told before a model is loaded.
    if kinds:
        python_of(folder)
    for case in cases:
        RunOptions(num_slots=case.batch, kv_dtype=kv_dtype)
    say(f"ours: loads {model}")
    loaded, load_s = load_model(model)
    if kinds and not loaded.path.is_file():
        raise ValueError(f"{model} is a folder; peers read a GGUF file, so give one")
    ids = loaded.tokenizer.encode(TEXT)
    with compare.started_peers(
        kinds, folder, loaded.path, threads, timeout_s=timeout_s, say=say
    ) as started:
        found = compare.measure(
            loaded.params,
            ids,
            cases,
            started,
            rounds=rounds,
            threads=threads,
            kv_dtype=kv_dtype,
            say=say,
        )
    found["ours"]["load_s"] = load_s
    return {"model": model, "file": loaded.path.name, **found}


def say(line: str) -> None:
    """Tell on standard error what goes on."""
    print(f"infer: {line}", file=sys.stderr, flush=True)


def cases_of(
    what: What, batch: str | None, prompt_tokens: int | None, new_tokens: int | None
) -> list[DecodeCase]:
    """Return what is run: decode starts with the prefill of one prompt of 512 tokens.

    Raises:
        ValueError: a number of `batch` is none, or `new_tokens` is given with prefill.
    """
    if what is What.prefill:
        if new_tokens is not None:
            raise ValueError("--new-tokens goes with decode; prefill ends at the first token")
        tokens = prompt_tokens or _PREFILL_TOKENS
        return [
            DecodeCase(batch=size, prompt_tokens=tokens, new_tokens=1)
            for size in batch_sizes("1" if batch is None else batch)
        ]
    return [
        DecodeCase(batch=1, prompt_tokens=_PREFILL_TOKENS, new_tokens=1),
        *(
            DecodeCase(batch=size, prompt_tokens=prompt_tokens or 32, new_tokens=new_tokens or 64)
            for size in batch_sizes("1,8,32" if batch is None else batch)
        ),
    ]


def peer_names(text: str) -> list[str]:
    """Return the peers that `--against` names.

    Raises:
        ValueError: one is unknown.
    """
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in _PEERS:
            raise ValueError(f"no peer is called {name!r}; there are {', '.join(_PEERS)}")
    return names


def batch_sizes(text: str) -> list[int]:
    """Return the numbers of `--batch`.

    Raises:
        ValueError: one is no positive number, or comes twice.
    """
    parts = [part.strip() for part in text.split(",")]
    # Nine digits: int() refuses thousands of them in words of its own.
    numbers = [int(part) for part in parts if part.isdecimal() and len(part) <= 9]
    if len(numbers) < len(parts) or 0 in numbers or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"--batch is {text!r:.80}; give different positive numbers, such as 1,8,32"
        )
    return numbers
