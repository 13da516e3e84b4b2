"""`infer generate`: text from prompts."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from infer import native
from infer.cli.batch import Batch
from infer.cli.drafting import check_draft, drafter_of
from infer.cli.interrupt import interruptible
from infer.cli.loading import check_name, load_model, use_compilation_cache
from infer.cli.options import (
    DraftOption,
    DraftRuleOption,
    DtypeOption,
    ImplementationOption,
    KVDtypeOption,
    MinPOption,
    ModelOption,
    PackedOption,
    SeedOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    value_of,
)
from infer.cli.request import Prompt, read_batch, read_prompts, sampling_fields, sampling_params
from infer.errors import ConfigError
from infer.serve.batch_file import is_openai_batch

# Of the result's figures, those that `--json` prints beside load_s; the last three only if present.
_STATS = ("compile_s", "ttft_s", "decode_tokens_per_s", "prefill_tokens_per_s", "compiles")
_OPTIONAL_STATS = ("acceptance_rate", "tokens_per_pass", "seed")


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Without one, standard input is the prompt."),
    ] = None,
    *,
    model: ModelOption,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="With --json: each token's log-probability.")
    ] = False,
    batch_file: Annotated[
        str | None,
        typer.Option(
            help='One prompt a line: text, or {"prompt": ..., sampling fields}; or requests in '
            "OpenAI's batch format; - is stdin."
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Answers to an OpenAI batch, written as they come; run again to finish one that "
            "was interrupted."
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user's message: use the chat template.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    num_slots: Annotated[
        int | None, typer.Option(min=1, help="Sequences that run at once.")
    ] = None,
    page_size: Annotated[int | None, typer.Option(min=1, help="Tokens a cache page.")] = None,
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens a prefill step.")
    ] = None,
    kv_dtype: KVDtypeOption = None,
    draft: DraftOption = None,
    draft_rule: DraftRuleOption = None,
    implementation: ImplementationOption = None,
    dtype: DtypeOption = None,
    packed: PackedOption = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Quantise after loading, without calibration: rtn8 to rtn2 (rtn4-g32), int8, "
            "llm-int8, fp8, nf4, fp4, mxfp4, mxfp6, mxfp8, nvfp4."
        ),
    ] = None,
) -> None:
    """Generate text from prompts; the text goes to standard output, figures to standard error."""
    if logprobs and not as_json:
        raise ValueError("--logprobs needs --json")
    if prompts and batch_file is not None:
        raise ValueError("give prompts or --batch-file, not both")
    if quantize is not None:
        if packed is not None:
            raise ConfigError("--packed keeps the file's own weights, --quantize packs others")
        check_name(quantize)
    check_draft(draft, draft_rule)
    options: dict[str, Any] = {}

    def load() -> tuple[Any, float]:
        loaded, seconds = load_model(
            model, dtype, packed, value_of(implementation), quantize=quantize
        )
        if draft is not None:
            form = value_of(implementation)
            options["draft"] = drafter_of(draft, loaded, dtype, packed, form, draft_rule)
        return loaded, seconds

    batch = None if batch_file is None else read_batch(batch_file)
    given = {
        "num_slots": num_slots,
        "page_size": page_size,
        "prefill_chunk": prefill_chunk,
        "implementation": value_of(implementation),
        "kv_dtype": value_of(kv_dtype),
    }
    options |= {name: x for name, x in given.items() if x is not None}
    if batch is not None and is_openai_batch(batch[1]):
        if chat or logprobs:
            raise ConfigError(
                "--chat and --logprobs are for prompts; the requests of an OpenAI batch say this "
                "themselves"
            )
        given = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "seed": seed,
        }
        job = Batch(*batch, out=out, model=model, defaults=given, as_json=as_json)
        job.run(load, options)
        return
    if out is not None:
        raise ConfigError(
            "--out is for a --batch-file in OpenAI's format, whose lines have a custom_id; for "
            "prompts redirect standard output"
        )
    todo = read_prompts(prompts or [], batch)
    use_compilation_cache()
    base = sampling_fields(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
    )
    sampling = [sampling_params(base, prompt) for prompt in todo]
    loaded, load_s = load()
    given = model_prompts(loaded, [prompt.text for prompt in todo], chat)
    if len(todo) == 1 and not as_json and sys.stdout.isatty():
        pieces = loaded.stream(given[0], sampling=sampling[0], **options)
        text, stats = write_stream(pieces, take=lambda: interruptible(lambda: next(pieces, None)))
        print()
        stats = {**stats, "load_s": load_s, "reason": why_plain(options)}
        print(summary(stats, text, loaded), file=sys.stderr)
        refuse_aborted(stats)
        return
    result = interruptible(lambda: loaded.generate(given, sampling=sampling, **options))
    if as_json:
        print(json.dumps(as_object(model, todo, result, load_s, logprobs), allow_nan=False))
        refuse_aborted(result.stats)
        return
    print(as_text(todo, result.text))
    stats = {**result.stats, "load_s": load_s, "reason": why_plain(options)}
    print(summary(stats), file=sys.stderr)
    refuse_aborted(stats)


def refuse_aborted(stats: dict[str, Any]) -> None:
    """End with exit code 1 if the model's logits were not numbers somewhere."""
    if stats.get("aborted"):
        print(
            f"infer: {stats['aborted']} of {len(stats['num_output_tokens'])} continuations ended"
            " early: the model's logits are NaN; its weights are damaged, or --dtype is too small"
            " for them",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def model_prompts(loaded: Any, texts: list[str], chat: bool) -> list[Any]:
    """Return what the model is given for each text: itself, or the ids of a chat's first turn."""
    if not chat:
        return list(texts)
    if not loaded.tokenizer.chat_template:
        raise ConfigError(
            "this model has no chat template (a base model?), so it cannot chat; leave --chat out "
            "to continue the text, or take an instruct model"
        )
    render = loaded.tokenizer.apply_chat_template
    return [
        render([{"role": "user", "content": text}], add_generation_prompt=True) for text in texts
    ]


def write_stream(
    pieces: Iterator[str], take: Callable[[], str | None] | None = None
) -> tuple[str, dict[str, Any]]:
    """Write text as it comes; return it with its figures, the stream's own if it has some.

    Args:
        take: gives the next piece, None at the end; by default straight from `pieces`.
    """
    start = time.perf_counter()
    first, written = None, []
    for piece in pieces if take is None else iter(take, None):
        if first is None:
            first = time.perf_counter()
        written.append(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()
    stats: dict[str, Any] = dict(getattr(pieces, "stats", None) or {})
    if not stats and first is not None:
        import jax

        rest_s = time.perf_counter() - first
        backend = jax.default_backend()
        stats = {"ttft_s": first - start, "rest_s": rest_s, "backend": backend}
    return "".join(written), stats


def as_object(
    model: str, todo: list[Prompt], result: Any, load_s: float, logprobs: bool
) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    stats = result.stats
    outputs = []
    for row, prompt in enumerate(todo):
        length = int(result.lengths[row])
        output: dict[str, Any] = {
            "prompt": prompt.text,
            "text": result.text[row],
            "token_ids": [int(token) for token in result.tokens[row][:length]],
            "finish_reason": result.finish_reason[row],
            "num_prompt_tokens": int(stats["num_prompt_tokens"][row]),
            "num_output_tokens": length,
        }
        if logprobs:
            output["logprobs"] = [_finite(x) for x in result.logprobs[row][:length]]
        outputs.append(output)
    figures = {"load_s": load_s} | {name: _finite(stats.get(name)) for name in _STATS}
    figures |= {name: stats[name] for name in _OPTIONAL_STATS if name in stats}
    return {
        "model": model,
        "backend": stats.get("backend"),
        "implementation": stats.get("implementation"),
        "implementations": stats.get("implementations"),
        "outputs": outputs,
        "stats": figures,
    }


def _finite(value: Any) -> Any:
    """Return a number that JSON can say, or None."""
    if value is None or isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


def as_text(todo: list[Prompt], texts: list[str]) -> str:
    """Return the text of one prompt as it is; of several, each below its prompt's first words."""
    if len(todo) == 1:
        return texts[0]
    blocks = []
    for number, (prompt, text) in enumerate(zip(todo, texts, strict=True), start=1):
        words = " ".join(prompt.text.split())
        blocks.append(f"[{number}] {words[:60] + '...' if len(words) > 60 else words}\n{text}")
    return "\n\n".join(blocks)


def summary(stats: dict[str, Any], text: str = "", model: Any = None) -> str:
    """Return the line of figures: tokens/s, time to first token, what was compiled, what ran."""
    parts = []
    if stats.get("num_output_tokens"):
        parts.append(f"{sum(stats['num_output_tokens'])} tokens")
    rate = stats.get("decode_tokens_per_s")
    if rate is None and stats.get("rest_s") and model is not None:
        rate = len(model.tokenizer.encode(text)) / stats["rest_s"]
    if rate is not None:
        parts.append(f"{rate:.1f} tokens/s")
    if stats.get("acceptance_rate") is not None:
        parts.append(f"{stats['acceptance_rate']:.0%} of {stats['drafted']} drafts accepted")
    if stats.get("ttft_s") is not None:
        parts.append(f"first token after {stats['ttft_s']:.3f} s")
    if stats.get("load_s") is not None:
        parts.append(f"loaded in {stats['load_s']:.2f} s")
    if stats.get("compiles"):
        parts.append(f"compiled in {stats['compile_s']:.2f} s")
    parts += [str(stats[name]) for name in ("backend", "implementation") if stats.get(name)]
    if stats.get("reason") and stats.get("backend") == "cpu":
        parts[-1] += f" ({stats['reason']})"
    return ", ".join(parts)


def why_plain(options: dict[str, Any]) -> str:
    """Return why native operations that are there do not run, if only a variable keeps them."""
    if options.get("implementation") is None and native.switched_off():
        return native.why_not_by_default()
    return ""
