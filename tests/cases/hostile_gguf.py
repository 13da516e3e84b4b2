"""GGUF files that are broken or hostile, each with a piece of the message that refuses it.

Bugs of other readers as cases: counts that wrap in 64 bits, sizes believed before they are checked,
reads past the end, an alignment of 0 (ggml-org/llama.cpp#25378, ggml-org/ggml#709,
ggml-org/llama.cpp#26690).
"""

import struct

from tests.cases.gguf_bytes import ARRAY, STRING, UINT8, UINT32, gguf, pair, string, tensor_info

F32, Q4_0 = 0, 2
DATA = struct.pack("<8f", *range(8))

ACCEPTED: dict[str, bytes] = {
    "plain": gguf([tensor_info("a", [4, 2], F32, 0)], DATA),
    "alignment 64": gguf(
        [tensor_info("a", [4, 2], F32, 0)],
        DATA,
        [pair("general.alignment", UINT32, 64)],
        alignment=64,
    ),
    "version 2": gguf([tensor_info("a", [4, 2], F32, 0)], DATA, version=2),
    "bytes after the last tensor": gguf([tensor_info("a", [4, 2], F32, 0)], DATA + b"rest"),
    "no tensors": gguf(),
    "nothing at all": gguf(pairs=[]),
}


def _nested(depth: int) -> bytes:
    """An array in an array in ... `depth` times, the innermost empty."""
    heads = struct.pack("<IQ", ARRAY, 1) * (depth - 1) + struct.pack("<IQ", UINT8, 0)
    return string("deep") + struct.pack("<I", ARRAY) + heads


def _one(name: str | bytes, dims: list[int], kind: int = F32, offset: int = 0) -> bytes:
    return gguf([tensor_info(name, dims, kind, offset)], DATA)


REFUSED: dict[str, tuple[bytes, str]] = {
    # Shapes and sizes
    "five axes": (_one("a", [1, 1, 1, 1, 8]), "claims 5 axes"),
    "4e9 axes": (
        gguf([string("a") + struct.pack("<I", 2**32 - 1)], b"\0" * 64),
        "claims 4294967295 axes",
    ),
    "a count that wraps to 0": (_one("a", [2**32, 2**32]), "ends at byte 73786976294838206"),
    "a byte size that wraps": (_one("a", [2**62, 1]), "ends at byte 18446744073709551"),
    "an axis of 0": (_one("a", [0, 4]), "no axis may be 0"),
    "a row of 31 in blocks of 32": (_one("a", [31, 2], Q4_0), "whole blocks of 32"),
    # Places
    "data cut short": (_one("a", [4, 2])[:-4], "ends at byte 160, and the file at 156"),
    "an offset past the end": (_one("a", [4, 2], offset=4096), "ends at byte 4256"),
    "an offset near 2^64": (_one("a", [4, 2], offset=2**64 - 32), "ends at byte 18446744073709551"),
    "an offset that is not aligned": (_one("a", [2], offset=4), "multiple of the alignment 32"),
    "two tensors in one place": (
        gguf([tensor_info("a", [8], F32, 0), tensor_info("b", [8], F32, 0)], DATA),
        "'a' and 'b' share the bytes from 160 on",
    ),
    "one tensor inside another": (
        gguf([tensor_info("a", [24], F32, 0), tensor_info("b", [8], F32, 32)], DATA * 3),
        "'a' and 'b' share the bytes",
    ),
    # Names and types
    "a tensor twice": (
        gguf([tensor_info("a", [8], F32, 0), tensor_info("a", [8], F32, 32)], DATA * 2),
        "has the tensor 'a' twice",
    ),
    "a key twice": (gguf(pairs=[pair("k", UINT32, 1), pair("k", UINT32, 2)]), "key 'k' twice"),
    "an unknown tensor type": (_one("a", [8], 999), "has the type 999, which is not known"),
    "a removed tensor type": (_one("a", [32], 4), "has the type 4, Q4_2, which ggml has removed"),
    "an unknown value type": (
        gguf(pairs=[string("k") + struct.pack("<I", 13)]) + b"\0" * 64,
        "has the value type 13",
    ),
    "an unknown item type": (
        gguf(pairs=[string("k") + struct.pack("<IIQ", ARRAY, 99, 0)]) + b"\0" * 64,
        "has the value type 99",
    ),
    "NUL in a tensor name": (_one("a\0b", [8]), "'a\\x00b', holds a NUL"),
    "NUL in a key": (gguf(pairs=[pair("a\0b", UINT32, 1)]), "'a\\x00b', holds a NUL"),
    "an empty tensor name": (_one("", [8]), "the name of tensor 0 is empty"),
    "an empty key": (gguf(pairs=[pair("", UINT32, 1)]), "metadata key 0 is empty"),
    "a tensor name not in UTF-8": (_one(b"\xff\xfe", [8]), "not UTF-8"),
    "a key not in UTF-8": (gguf(pairs=[pair(b"\xc3", UINT32, 1)]), "not UTF-8"),
    "a line break in a name": (_one("a\nb", [2**40]), "tensor 'a\\nb', F32"),
    "a key of 70000 bytes": (gguf(pairs=[pair("k" * 70000, UINT32, 1)]), "65535 is the limit"),
    # Lengths and counts
    "a key of 2^62 bytes": (gguf(pairs=[struct.pack("<Q", 2**62) + b"x" * 20]), "4611686018427"),
    "a string of 2^62 bytes": (
        gguf(pairs=[string("k") + struct.pack("<IQ", STRING, 2**62)]),
        "takes 4611686018427387904 bytes",
    ),
    "an array of 2^61 numbers": (
        gguf(pairs=[string("k") + struct.pack("<IIQ", ARRAY, UINT32, 2**61)]),
        "claims 2305843009213693952 items",
    ),
    "an array of 2^61 strings": (
        gguf(pairs=[string("k") + struct.pack("<IIQ", ARRAY, STRING, 2**61)]),
        "claims 2305843009213693952 items",
    ),
    "a string past the end in an array": (
        gguf(pairs=[string("k") + struct.pack("<IIQQ", ARRAY, STRING, 2, 2**63) + b"\0" * 32]),
        "runs past the end",
    ),
    "arrays nested 9 deep": (gguf(pairs=[_nested(9)]), "nests arrays deeper than the limit of 8"),
    "arrays nested 10^5 deep": (gguf(pairs=[_nested(10**5)]), "nests arrays deeper"),
    "2^60 tensors": (gguf(num_tensors=2**60), "claims 1152921504606846976 tensors"),
    "2^60 keys": (gguf(num_pairs=2**60), "claims 1152921504606846976 metadata keys"),
    "200000 tensors": (gguf(num_tensors=200_000) + b"\0" * 5_000_000, "no more than 131072"),
    # Alignment
    "alignment 0": (gguf(pairs=[pair("general.alignment", UINT32, 0)]), "alignment is 0, not"),
    "alignment 48": (gguf(pairs=[pair("general.alignment", UINT32, 48)]), "not a power of two"),
    "alignment as a string": (
        gguf(pairs=[pair("general.alignment", STRING, "32")]),
        "has the type string and must be an integer",
    ),
    # Other files
    "nothing": (b"", "is empty (0 bytes)"),
    "three bytes": (b"GGU", "starts with b'GGU'"),
    "the magic alone": (b"GGUF", "the version takes 4 bytes, and 0 are left"),
    "GGML's magic": (gguf(magic=b"GGML"), "starts with b'GGML'"),
    "a file from before GGUF": (gguf(magic=b"tjgg"), "from before GGUF"),
    "version 1": (gguf(version=1), "is GGUF version 1"),
    "version 0": (gguf(version=0), "is GGUF version 0"),
    "version 99": (gguf(version=99), "is GGUF version 99"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
    "a zip archive": (b"PK\x03\x04" + b"\0" * 60, "is a zip archive"),
    "a safetensors file": (struct.pack("<Q", 2) + b"{}", "is a safetensors file"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "a web page": (b"\n<!DOCTYPE html>", "is JSON or HTML text"),
    "text": (b"hello, world", "starts with b'hell'"),
}
