"""Feed a reader with bytes that coverage guides, until the time is up.

    python scripts/fuzz.py gguf --seconds 60

Needs `pip install atheris` (3.0 has wheels for Python 3.11 to 3.13) beside numpy and jaxtyping,
`ml_dtypes` for safetensors and `tokenizers` for that target.
WeightFormatError is the one exception that a file may cause; another one, more than 5 seconds or
more than 1 GB end the run, and the input is kept for a test.  Prints one JSON line.

A new target is a function that returns what to call with bytes, and files to begin with, and a line
in `TARGETS`.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS_PER_INPUT = 5
MEMORY_MB = 1024
MAX_BYTES = 4096
MAX_TOKENIZER_BYTES = 16384  # a tekken file has an entry for each byte

Target = tuple[Callable[[bytes], None], list[bytes]]


def gguf() -> Target:
    from infer.errors import WeightFormatError
    from infer.quant.formats import GGML_TYPES
    from infer.weights import gguf_split
    from infer.weights.gguf import GGUFFile
    from infer.weights.summary import summarise
    from tests.cases import gguf_bytes as g
    from tests.cases.hostile_gguf import ACCEPTED, REFUSED

    def allowed(call: Callable[[], object]) -> None:
        try:
            call()
        except WeightFormatError as error:
            assert str(error).isprintable()

    def one_input(data: bytes) -> None:
        try:
            file = GGUFFile("fuzz", data)
        except WeightFormatError as error:
            assert str(error).isprintable()
            return
        for key in file.metadata:
            allowed(lambda key=key: file.metadata.raw(key).value())
        for name, info in file.tensors.items():
            assert file.raw(name).nbytes == info.nbytes
            allowed(lambda name=name: file.array(name))
        allowed(lambda: summarise(file))
        allowed(lambda: gguf_split.part_paths("fuzz-00001-of-00002.gguf", "fuzz", file.metadata))
        allowed(lambda: gguf_split.check_parts([file, file]))

    of_each_type = [
        g.gguf([g.tensor_info("w", [f.group, 2], n, 0)], bytes(range(256)) * 3)
        for n, f in GGML_TYPES.items()
    ]
    refused = [data for data, _ in REFUSED.values()]
    seeds = [d for d in (*ACCEPTED.values(), *refused, *of_each_type) if len(d) <= MAX_BYTES]
    return one_input, seeds


def safetensors() -> Target:
    from infer.errors import WeightFormatError
    from infer.weights.safetensors import SafetensorsFile
    from tests.cases.hostile_safetensors import ACCEPTED, REFUSED

    def one_input(data: bytes) -> None:
        try:
            file = SafetensorsFile("fuzz", data)
        except WeightFormatError as error:
            assert str(error).isprintable()
            return
        for name, info in file.tensors.items():
            assert file.raw(name).nbytes == info.nbytes
            file.array(name)

    refused = [data for data, _ in REFUSED.values()]
    accepted = [data for data, _ in ACCEPTED.values()]
    seeds = [d for d in (*accepted, *refused) if len(d) <= MAX_BYTES]
    return one_input, seeds


def tokenizer() -> Target:
    """SentencePiece models, tiktoken and tekken files; the first byte says which."""
    from infer.errors import WeightFormatError
    from infer.tokenizer import Tokenizer
    from infer.tokenizer.sentencepiece_files import read_sentencepiece
    from infer.tokenizer.tiktoken_files import read_tekken, read_tiktoken
    from tests.cases import tokenizer_bytes as t

    readers = (
        read_sentencepiece,
        read_tekken,
        lambda data: read_tiktoken(
            data, pattern=r"\w+|\W", special_tokens={}, bos_token=None, eos_token=None
        ),
    )

    def one_input(data: bytes) -> None:
        try:
            read = Tokenizer(readers[data[0] % len(readers)](data[1:])) if data else None
        except WeightFormatError as error:
            assert str(error).isprintable()
            return
        if read is not None:
            ids = read.encode("ab \u00e9 12  x<s>", parse_special=True)
            read.decode(ids)
            assert all(0 <= i < read.vocab_size for i in ids)

    pieces = [
        ("\u2581", -4.0, 1),
        ("a", -3.0, 1),
        ("ab", -2.0, 1),
        ("\u2581a", -1.0, 1),
        ("x", 0.0, 4),
    ]
    units = [0x100 << 10] + [0] * 511
    units[256 ^ 0x41], units[256 ^ 0x40] = 0x41 | 0x100 | (1 << 10), 0x80000000
    mapped = t.message(f2=t.charsmap(units, b"b\0"), f4=1)
    models = [
        t.sentencepiece_model(pieces),
        t.sentencepiece_model(pieces, kind=t.UNIGRAM),
        t.sentencepiece_model(pieces, kind=t.UNIGRAM, normalizer=mapped),
        t.sentencepiece_model([*pieces, *t.byte_pieces()], trainer=t.message(f35=1)),
    ]
    seeds = [b"\0" + model for model in models]
    seeds += [b"\1" + t.tekken_file([b"ab"]), b"\2" + t.tiktoken_file([b"ab"])]
    return one_input, seeds


TARGETS: dict[str, Callable[[], Target]] = {
    "gguf": gguf,
    "safetensors": safetensors,
    "tokenizer": tokenizer,
}


def run_here(target: str, seconds: int, folder: Path) -> None:
    """Fuzz in this process; libFuzzer ends it."""
    import atheris

    sys.path.insert(0, str(ROOT))
    with atheris.instrument_imports(include=["infer"]):
        one_input, seeds = TARGETS[target]()
    corpus = folder / "corpus"
    corpus.mkdir()
    for i, seed in enumerate(seeds):
        (corpus / f"seed{i}").write_bytes(seed)
    options = [
        f"-max_total_time={seconds}",
        f"-timeout={SECONDS_PER_INPUT}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-max_len={MAX_TOKENIZER_BYTES if target == 'tokenizer' else MAX_BYTES}",
        f"-artifact_prefix={folder}/",
        "-print_final_stats=1",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *options, str(corpus)], one_input)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--crashes", type=Path, default=Path("crashes"), help="folder for inputs")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here is not None:
        run_here(args.target, args.seconds, args.here)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, __file__, args.target, "--seconds", str(args.seconds)]
        done = subprocess.run(
            [*command, "--here", name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        executions = re.search(r"number_of_executed_units:\s*(\d+)", done.stdout)
        kept = [path for path in folder.iterdir() if path.is_file()]
        for path in kept:
            args.crashes.mkdir(exist_ok=True)
            (args.crashes / path.name).write_bytes(path.read_bytes())
        if done.returncode or executions is None:
            print(done.stdout[-4000:], file=sys.stderr)
        result = {
            "target": args.target,
            "seconds": args.seconds,
            "executions": int(executions[1]) if executions else None,
            "corpus": len(list((folder / "corpus").glob("*"))),
            "crashes": [str(args.crashes / path.name) for path in kept],
        }
    print(json.dumps(result))
    return 1 if kept or done.returncode or executions is None else 0


if __name__ == "__main__":
    sys.exit(main())
