"""llama.cpp as a peer, through the low-level API of llama-cpp-python.

Every batch size goes through `llama_batch` with one sequence id a row and one `llama_decode` a
step, as llama.cpp's own batched-bench does; tokens are the argmax of the logits.
"""

import ctypes
import re
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from peer_protocol import serve

_model: Any = None
_threads = 1
# The context of the last shape asked for: making one is not part of a measurement.
_context: tuple[tuple[int, int], Any, Any] | None = None
# The prompts whose keys and values are in that context.
_held: list[list[int]] | None = None


def load(path: str, threads: int, dtype: str | None = None) -> dict[str, Any]:
    """Load the file; `dtype` is that of other peers."""
    global _model, _threads
    start = time.perf_counter()
    _threads = threads
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    _model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    if not _model:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    seconds = time.perf_counter() - start
    info = llama_cpp.llama_print_system_info().decode()
    if "OPENMP = 1" not in info:
        raise RuntimeError(f"this llama.cpp is built without OpenMP ({info}); run scripts/peers.sh")
    return {
        "load_s": seconds,
        "info": info,
        "version": llama_cpp.__version__,
        "details": {
            "threads": threads,
            "openmp": openmp_runtime(),
            "build_flags": build_flags(),
            **context_settings(),
        },
    }


def openmp_runtime() -> str:
    """Return the OpenMP library that ggml's CPU library asks for: libomp is clang's, libgomp gcc's;
    empty if its bytes name none.
    """
    for path in Path(llama_cpp.__file__).parent.glob("lib/libggml-cpu.so"):
        if found := re.search(rb"lib(omp|gomp|iomp)[0-9]*\.so[.0-9]*", path.read_bytes()):
            return found.group().decode()
    return ""


def build_flags() -> str:
    """Return the options that scripts/peers.sh has built with; the system's info tells most of
    them too.
    """
    file = Path(sys.prefix) / "llama_cpp_build.txt"
    return file.read_text().strip() if file.exists() else "not recorded"


def context_settings() -> dict[str, Any]:
    """Return what llama.cpp's defaults are for the cache, attention and batches."""
    params = llama_cpp.llama_context_default_params()
    types = {llama_cpp.GGML_TYPE_F32: "f32", llama_cpp.GGML_TYPE_F16: "f16"}
    return {
        "cache": types.get(params.type_k, str(params.type_k)),
        "flash_attention": {-1: "auto", 0: "off", 1: "on"}[params.flash_attn_type],
        "batch_tokens": params.n_batch,
        "ubatch_tokens": params.n_ubatch,
    }


def generate(prompts: list[list[int]], new_tokens: int, reuse: bool = False) -> dict[str, Any]:
    """Prefill all prompts, then one greedy token a row and step.

    With `reuse`, prompts whose keys and values are still there from the last call are not prefilled
    again, but for their last token.
    """
    global _held
    length = len(prompts[0]) + new_tokens
    context, batch = _context_for(len(prompts), length)
    memory = llama_cpp.llama_get_memory(context)
    reuse = reuse and _held == prompts
    if not reuse:
        llama_cpp.llama_memory_clear(memory, True)
    start = time.perf_counter()
    if reuse:
        at = len(prompts[0]) - 1
        for row in range(len(prompts)):
            if not llama_cpp.llama_memory_seq_rm(memory, row, at, -1):
                raise RuntimeError("this model's cache cannot go back to the end of the prompt")
        _decode(context, batch, [(ids[-1], at, row, True) for row, ids in enumerate(prompts)])
        last = [_argmax(context, row) for row in range(len(prompts))]
    else:
        last = _prefill(context, batch, prompts)
        _held = prompts
    out = [[token] for token in last]
    first = time.perf_counter()
    for step in range(1, new_tokens):
        position = len(prompts[0]) + step - 1
        entries = [(token, position, row, True) for row, token in enumerate(last)]
        _decode(context, batch, entries)
        last = [_argmax(context, row) for row in range(len(prompts))]
        for row, token in enumerate(last):
            out[row].append(token)
    end = time.perf_counter()
    return {"ttft_s": first - start, "decode_s": end - first, "tokens": out}


def speculate(prompts: list[list[int]], new_tokens: int, k: int) -> dict[str, Any]:
    """Greedy tokens with up to `k` drafts a row and step by prompt lookup, whose n-grams and order
    are llama-cpp-python's defaults; 0 is plain decoding.  Prompts may differ in length.

    A row's last token and its drafts go through one `llama_decode` with those of the other rows;
    what did not stand is removed from the cache.
    """
    global _held
    context, batch = _context_for(len(prompts), max(map(len, prompts)) + new_tokens)
    memory, _held = llama_cpp.llama_get_memory(context), None
    llama_cpp.llama_memory_clear(memory, True)
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=k) if k else None
    start = time.perf_counter()
    rows = [list(ids) for ids in prompts]
    for ids, token in zip(rows, _prefill(context, batch, prompts), strict=True):
        ids.append(token)
    first = time.perf_counter()
    ends = [len(ids) + new_tokens for ids in prompts]
    drafted = accepted = passes = 0
    while any(len(ids) < end for ids, end in zip(rows, ends, strict=True)):
        entries, blocks = [], []
        for row, (ids, end) in enumerate(zip(rows, ends, strict=True)):
            if (left := end - len(ids)) <= 0:
                continue
            found = lookup(np.asarray(ids, np.intc))[: left - 1].tolist() if lookup else []
            blocks.append((row, len(entries), found))
            at = len(ids) - 1
            entries += [(token, at + i, row, True) for i, token in enumerate([ids[-1], *found])]
        _decode(context, batch, entries)
        for row, index, found in blocks:
            stand = 0
            token = _argmax(context, index)
            while stand < len(found) and found[stand] == token:
                rows[row].append(token)
                stand += 1
                token = _argmax(context, index + stand)
            rows[row].append(token)
            if stand < len(found):
                llama_cpp.llama_memory_seq_rm(memory, row, len(rows[row]) - 1, -1)
            drafted, accepted, passes = drafted + len(found), accepted + stand, passes + 1
    end_s = time.perf_counter()
    return {
        "ttft_s": first - start,
        "decode_s": end_s - first,
        "tokens": [ids[len(p) :] for ids, p in zip(rows, prompts, strict=True)],
        "drafted": drafted,
        "accepted": accepted,
        "row_passes": passes,
    }


def logits(tokens: list[int], out: str) -> dict[str, Any]:
    """Write the logits of every position as a float32 array [T, V] to the file `out` (.npy)."""
    global _held
    context, batch = _context_for(1, len(tokens))
    if len(tokens) > llama_cpp.llama_n_ubatch(context):
        raise RuntimeError(f"{len(tokens)} tokens are more than one batch of llama.cpp takes")
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    _held = None
    _decode(context, batch, [(token, at, 0, True) for at, token in enumerate(tokens)])
    np.save(out, np.stack([_logits(context, at) for at in range(len(tokens))]))
    return {}


def quantize(source: str, target: str, file_type: str, pure: bool) -> dict[str, Any]:
    """Write `source` quantised to `file_type` ("Q4_0", "F16", ...) by llama.cpp's own quantiser.

    With `pure` every matrix gets that type, if its width can; the others get llama.cpp's second
    choice.
    """
    names = [f"LLAMA_FTYPE_MOSTLY_{file_type}{end}" for end in ("", "_S")]
    name = next(name for name in names if hasattr(llama_cpp, name))
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.pure, params.nthread = getattr(llama_cpp, name), pure, _threads
    llama_cpp.llama_backend_init()
    status = llama_cpp.llama_model_quantize(source.encode(), target.encode(), params)
    if status:
        raise RuntimeError(f"llama.cpp's quantiser returned {status} for {file_type}")
    return {}


def _context_for(rows: int, length: int) -> tuple[Any, Any]:
    global _context, _held
    if _context is None or _context[0] != (rows, length):
        if _context is not None:
            llama_cpp.llama_batch_free(_context[2])
            llama_cpp.llama_free(_context[1])
        params = llama_cpp.llama_context_default_params()
        per_row = -(-length // 256) * 256  # llama.cpp rounds a sequence's cells up to 256
        params.n_ctx, params.n_seq_max = rows * per_row, rows
        params.n_threads = params.n_threads_batch = _threads
        context = llama_cpp.llama_init_from_model(_model, params)
        if not context:
            raise RuntimeError(f"llama.cpp cannot make a context of {rows} x {per_row} tokens")
        batch = llama_cpp.llama_batch_init(llama_cpp.llama_n_batch(context), 0, 1)
        _context, _held = ((rows, length), context, batch), None
    return _context[1], _context[2]


def _prefill(context: Any, batch: Any, prompts: list[list[int]]) -> list[int]:
    """Decode all prompts in batches as large as the context takes; return each row's argmax."""
    size = llama_cpp.llama_n_batch(context)
    entries = [
        (token, position, row, position == len(ids) - 1)
        for row, ids in enumerate(prompts)
        for position, token in enumerate(ids)
    ]
    first: dict[int, int] = {}
    for at in range(0, len(entries), size):
        chunk = entries[at : at + size]
        _decode(context, batch, chunk)
        for index, (_, _, row, wanted) in enumerate(chunk):
            if wanted:
                first[row] = _argmax(context, index)
    return [first[row] for row in range(len(prompts))]


def _decode(context: Any, batch: Any, entries: list[tuple[int, int, int, bool]]) -> None:
    batch.n_tokens = len(entries)
    for index, (token, position, row, wanted) in enumerate(entries):
        batch.token[index] = token
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = row
        batch.logits[index] = wanted
    if status := llama_cpp.llama_decode(context, batch):
        raise RuntimeError(f"llama_decode returned {status}")


def _argmax(context: Any, index: int) -> int:
    return int(_logits(context, index).argmax())


def _logits(context: Any, index: int) -> np.ndarray:
    """Return a view of the logits of the batch's entry `index`."""
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(_model))
    pointer = llama_cpp.llama_get_logits_ith(context, index)
    address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(address, shape=(vocab,))


if __name__ == "__main__":
    handlers = {"generate": generate, "speculate": speculate, "logits": logits}
    serve({"load": load, **handlers, "quantize": quantize})
