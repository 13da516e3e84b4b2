"""llama.cpp as a peer, through the low-level API of llama-cpp-python.

Every batch size goes through `llama_batch` with one sequence id a row and one `llama_decode` a
step, as llama.cpp's own batched-bench does; tokens are the argmax of the logits.
"""

import ctypes
import time
from typing import Any

import llama_cpp
import numpy as np
from peer_protocol import serve

_model: Any = None
_threads = 1
# The context of the last shape asked for: making one is not part of a measurement.
_context: tuple[tuple[int, int], Any, Any] | None = None


def load(path: str, threads: int, dtype: str | None = None) -> dict[str, Any]:
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
    return {"load_s": seconds, "info": info, "version": llama_cpp.__version__}


def generate(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Prefill all prompts, then one greedy token a row and step."""
    length = len(prompts[0]) + new_tokens
    context, batch = _context_for(len(prompts), length)
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    start = time.perf_counter()
    last = _prefill(context, batch, prompts)
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


def _context_for(rows: int, length: int) -> tuple[Any, Any]:
    global _context
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
        _context = ((rows, length), context, batch)
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
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(_model))
    pointer = llama_cpp.llama_get_logits_ith(context, index)
    address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
    return int(np.ctypeslib.as_array(address, shape=(vocab,)).argmax())


if __name__ == "__main__":
    serve({"load": load, "generate": generate})
