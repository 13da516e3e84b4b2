r"""How text is cut into words for byte-level BPE: one entry for each `tokenizer.ggml.pre`.

A pre-tokenizer is a sequence of regular expressions. Each cuts every piece that the one before it
left, both at its matches and between them, so that nothing is lost.

Source: the names are llama.cpp's (`llama_vocab::impl::load`), the expressions those of the models'
own `tokenizer.json`, which llama.cpp quotes where it had to adapt them. We differ from llama.cpp
where it adapted: `(?i:'s)` is `'[sS]` there and so misses `'ſ`, and the words of Tekken and GPT-4o
are cut by ASCII case there, by Unicode case in the originals (`aÀb`: one word there, `a|Àb` here).
"""

from dataclasses import dataclass, replace

from infer.errors import WeightFormatError


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """Expressions in the order of use, and what the name implies beside them.

    Attributes:
        patterns: regular expressions in Oniguruma's syntax.
        ignore_merges: a word that is a token is taken whole, whatever the merges would make of it.
        add_bos: a prompt starts with BOS unless the file says otherwise.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SYMBOLS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _cased_words(suffix: str) -> str:
    lead = r"[^\r\n\p{L}\p{N}]?"
    return f"{lead}[{_UPPER}]*[{_LOWER}]+{suffix}|{lead}[{_UPPER}]+[{_LOWER}]*{suffix}"


_gpt2 = PreTokenizer(patterns=(_GPT2,))
_digits = PreTokenizer(patterns=(r"\p{N}", _GPT2))
_triples = PreTokenizer(patterns=(rf"{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}",))
_llama3 = replace(_triples, ignore_merges=True, add_bos=True)
_qwen2 = PreTokenizer(patterns=(rf"{_WORDS}|\p{{N}}|{_SYMBOLS}|{_SPACES}",))
_qwen35 = PreTokenizer(
    patterns=(
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    )
)
_deepseek3 = PreTokenizer(
    patterns=(
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)
_tekken = PreTokenizer(
    patterns=(rf"{_cased_words('')}|\p{{N}}|{_SYMBOLS_SLASH}|{_SPACES}",),
    ignore_merges=True,
    add_bos=True,
)
_gpt4o = PreTokenizer(
    patterns=(rf"{_cased_words(_CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS_SLASH}|{_SPACES}",)
)
_default = PreTokenizer(
    patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
)

_BY_NAMES: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", _default),
    ("gpt-2 phi-2 olmo mpt jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum", _gpt2),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", _digits),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", _llama3),
    ("dbrx smaug-bpe glm4 chatglm-bpe", _triples),
    ("qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2", _qwen2),
    ("qwen35", _qwen35),
    ("deepseek-v3 hunyuan-dense joyai-llm", _deepseek3),
    ("tekken", _tekken),
    ("gpt-4o llama4 kanana2 minimax-m2", _gpt4o),
)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: pre for names, pre in _BY_NAMES for name in names.split()
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer that GGUF files call `name`.

    Raises:
        WeightFormatError: the name is not known; a guess would give wrong ids without a sign.
    """
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise WeightFormatError(
            f"tokenizer.ggml.pre is {name!r}, which is not known; known: {known}"
        ) from None
