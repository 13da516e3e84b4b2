"""Options that several commands have, and the values that they can take."""

import enum
from typing import Annotated

import typer


class Implementation(enum.StrEnum):
    """The names of `infer.ops.choice`, which is not imported for them: it imports JAX."""

    xla = "xla"
    native = "native"
    triton = "triton"
    mosaic = "mosaic"
    jax_triton = "jax_triton"
    interpret = "interpret"


class KVDtype(enum.StrEnum):
    """What keys and values can be cached in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    int8 = "int8"
    int4 = "int4"
    float8_e4m3 = "float8_e4m3"
    int4_hadamard = "int4_hadamard"
    kivi4 = "kivi4"
    kivi2 = "kivi2"
    fp8 = "fp8"  # the same


class DraftRule(enum.StrEnum):
    """How drafts are judged: the names of `infer.spec.verify.Rule`."""

    block = "block"
    token = "token"
    coupled = "coupled"


ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="A known name, a GGUF file, a folder, or a hub id.")
]
TemperatureOption = Annotated[
    float | None, typer.Option(help="0 is greedy [default: 0; 1 with a sampling option].")
]
TopPOption = Annotated[float | None, typer.Option(help="Likeliest tokens of this mass.")]
TopKOption = Annotated[int | None, typer.Option(help="Likeliest K tokens; 0 or -1: all.")]
MinPOption = Annotated[float | None, typer.Option(help="Tokens this likely beside the top.")]
SeedOption = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
DtypeOption = Annotated[
    str | None, typer.Option(help="float32, bfloat16, ... [default: the backend's best].")
]
PackedOption = Annotated[
    bool | None,
    typer.Option(
        "--packed/--no-packed",
        help="Keep quantised weights packed: least memory [default: where that is fastest].",
    ),
]
KVDtypeOption = Annotated[
    KVDtype | None, typer.Option(help="Of the cache [default: that of the activations].")
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        metavar="DRAFTER",
        help="Speculate: ngram[:K], suffix[:K], lookahead[:K], self:LAYERS[:K] (the model's first "
        "layers), or a smaller model, MODEL[:K]; K drafts a round [default: none].",
    ),
]
DraftRuleOption = Annotated[
    DraftRule | None,
    typer.Option(
        help="How drafts are judged; with coupled a --seed draws what it draws without drafts "
        "[default: block]."
    ),
]
ImplementationOption = Annotated[
    Implementation | None,
    typer.Option(
        help="One for every operation that has it; interpret runs the Triton kernels anywhere, "
        "slowly [default: each operation's best here]."
    ),
]


def value_of(choice: enum.StrEnum | None) -> str | None:
    """Return the plain string of an option."""
    return None if choice is None else choice.value
