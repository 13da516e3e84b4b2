"""A file of prompts through one `jax.jit` of your own.

    python scripts/batch_generate.py prompts.txt --model smollm2-135m --max-tokens 64

Reads a prompt a line, pads their ids to one array, compiles one program around `infer.generate`
(prefill, decoding, sampling and the refill of slots are all inside), and prints one JSON line a
prompt; figures go to standard error.  The whole batch runs without the host, so take it as a start
for work that JAX should see as one function: add a vmap over keys, a reward, a gradient.  For files
that need error handling and resuming there is `infer generate --batch-file`.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import infer

STOP = 1  # Generation.finish_reason of a row that its last token ended


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompts", type=Path, help="a text file with a prompt a line")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-slots", type=int, default=8, help="prompts that run at a time")
    parser.add_argument("--device", default=None, help="cpu, gpu, cpu:1")
    return parser.parse_args()


def padded(rows: list[list[int]]) -> tuple[jax.Array, jax.Array]:
    """Return ids [R, T], zeros behind each row's end, and the rows' lengths [R]."""
    lens = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), lens.max()), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return jnp.asarray(tokens), jnp.asarray(lens)


def main() -> None:
    args = arguments()
    prompts = [line for line in args.prompts.read_text().splitlines() if line.strip()]
    if not prompts:
        sys.exit(f"{args.prompts} has no prompt; it needs one a line")
    model = infer.load(args.model, device=args.device)
    tokenizer = model.tokenizer
    if args.chat:
        turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
        rows = [tokenizer.apply_chat_template(turn) for turn in turns]
    else:
        rows = [tokenizer.encode(prompt) for prompt in prompts]
    sampling = infer.SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        stop_token_ids=tokenizer.eos_ids,  # the pure form has no tokenizer to ask
    )
    num_traces = 0

    @jax.jit
    def continuations(params, tokens, lens, key):
        nonlocal num_traces
        num_traces += 1
        out = infer.generate(
            params,
            tokens,
            prompt_lens=lens,
            sampling=sampling,
            key=key,
            num_slots=min(args.num_slots, len(rows)),
        )
        # Not the whole of it: `out.state` holds the cache, which the program then need not return.
        return out.tokens, out.lengths, out.finish_reason

    tokens, lens = padded(rows)
    start = time.perf_counter()
    program = continuations.lower(model.params, tokens, lens, jax.random.key(args.seed)).compile()
    compiled = time.perf_counter()
    out = program(model.params, tokens, lens, jax.random.key(args.seed))
    new, lengths, finish = jax.device_get(out)
    run_s = time.perf_counter() - compiled

    for prompt, ids, length, reason in zip(prompts, new, lengths, finish, strict=True):
        text = tokenizer.decode(ids[: length - (reason == STOP)].tolist(), continuation=True)
        print(json.dumps({"prompt": prompt, "text": text, "num_tokens": int(length)}))
    count = int(lengths.sum())
    print(
        f"{len(prompts)} prompts, {count} tokens in {run_s:.2f} s, {count / run_s:.1f} tokens/s "
        f"(prefill included); traced {num_traces} time, compiled in {compiled - start:.2f} s",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
