r"""How text is cut into words for byte-level BPE: one entry for each `tokenizer.ggml.pre`.

A pre-tokenizer is a sequence of regular expressions. Each cuts every piece that the one before it
left, both at its matches and between them, so that nothing is lost.

Source: the names are llama.cpp's (`llama_vocab::impl::load`), the expressions those of the models'
own `tokenizer.json`, which llama.cpp quotes where it had to adapt them. We differ from llama.cpp
where it adapted: `(?i:'s)` is `'[sS]` there and so misses `'ſ`; the words of Tekken and GPT-4o
are cut by ASCII case there, by Unicode case in the originals (`aÀb`: one word there, `a|Àb` here);
tests/tokenizer/test_pretokenizers.py lists the rest. Names whose text is not turned into bytes'
letters (gemma4, granite-embed-multi-311m, sarvam-moe, whitespace) are not read.
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


def _cased_words(suffix: str, but: str = "") -> str:
    lead, upper, lower = r"[^\r\n\p{L}\p{N}]?", f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    return f"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}"


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
_ASCII_SYMBOL_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARKED_WORDS = rf"{_ASCII_SYMBOL_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_deepseek3 = PreTokenizer(
    patterns=(
        r"\p{N}{1,3}",
        _HAN_KANA,
        rf"{_MARKED_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)
_spark = PreTokenizer(
    patterns=(
        r"\p{N}{1,3}",
        _HAN_KANA,
        rf"{_MARKED_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
        r"\p{N}",
    )
)
_AFMOE_SCRIPTS = (  # the second range begins where llama.cpp has it, not at U+F900
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_afmoe = PreTokenizer(
    patterns=(
        # Threes from the right: what is left over comes first.
        r"\p{N}{1,2}(?=(?:\p{N}{3})*(?!\p{N}))|\p{N}{3}",
        _AFMOE_SCRIPTS,
        rf"{_MARKED_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)
# The cased letters, spelled out as DeepSeek's tokenizer.json does.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_HAN_TO_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_deepseek_llm = PreTokenizer(
    patterns=(
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+\z",
        _HAN_TO_HANGUL,
        r"\p{N}+",
    )
)
_deepseek_coder = PreTokenizer(
    patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_TO_HANGUL, r"\p{N}")
)
_tekken = PreTokenizer(
    patterns=(rf"{_cased_words('')}|\p{{N}}|{_SYMBOLS_SLASH}|{_SPACES}",),
    ignore_merges=True,
    add_bos=True,
)
_GPT4O = rf"{_cased_words(_CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_SYMBOLS_SLASH}|{_SPACES}"
_gpt4o = PreTokenizer(patterns=(_GPT4O,))
_tiny_aya = PreTokenizer(patterns=(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))
_youtu = PreTokenizer(
    patterns=(
        "[\uac00-\ud7a3\u3131-\u318e]+"
        "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
        f"|[\u3105-\u312f]+|{_HAN_KANA}",
        rf"{_cased_words(_CONTRACTION + '?')}|\p{{N}}|{_SYMBOLS_SLASH}|{_SPACES}",
    ),
    ignore_merges=True,
)
_NOT_HAN = r"&&[^\p{Han}]"
_kimi_k2 = PreTokenizer(
    patterns=(
        rf"\p{{Han}}+|{_cased_words(_CONTRACTION + '?', but=_NOT_HAN)}"
        rf"|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}",
    )
)
_default = PreTokenizer(
    patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
)
_falcon = PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))
_jais2 = PreTokenizer(
    patterns=(
        rf"{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|\s*[\r\n]+|"
        + "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
        + r"|\s{1,2}(?!\S)|\s",
    )
)
_NO_STOPS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_bloom = PreTokenizer(patterns=(_NO_STOPS,))
_viking = PreTokenizer(patterns=(_NO_STOPS, r"\p{N}"))
_chameleon = PreTokenizer(
    patterns=(
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
    ),
    add_bos=True,
)
_superbpe = PreTokenizer(patterns=(r"\p{N}+", r"(?=(\d{3})+(?!\d))"))
_bailing = PreTokenizer(
    patterns=(
        rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS}"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_seed_coder = PreTokenizer(
    patterns=(rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
)
_ufakzeka = PreTokenizer(
    patterns=(rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS}|{_SPACES}",)
)
_laguna = PreTokenizer(patterns=(r"[^\n]+|[\n]+", *_qwen2.patterns))
_exaone_moe = PreTokenizer(
    patterns=(
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_minicpm5 = PreTokenizer(
    patterns=(r"\p{N}{1,3}", rf"{_WORDS}|\p{{N}}+|{_SYMBOLS}|{_SPACES}"), ignore_merges=True
)

_BY_NAMES: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", _default),
    ("falcon", _falcon),
    (
        "gpt-2 phi-2 olmo mpt jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum jina-es"
        " jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe modern-bert",
        _gpt2,
    ),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", _digits),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _llama3),
    ("dbrx smaug-bpe glm4 glm5 chatglm-bpe", _triples),
    ("jais-2", _jais2),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        _qwen2,
    ),
    ("qwen35", _qwen35),
    ("ufakzeka", _ufakzeka),
    ("laguna", _laguna),
    ("minicpm5", _minicpm5),
    ("seed-coder", _seed_coder),
    ("exaone-moe", _exaone_moe),
    ("bailingmoe bailingmoe2 llada-moe", _bailing),
    ("deepseek-llm", _deepseek_llm),
    ("deepseek-coder", _deepseek_coder),
    ("deepseek-v3 hunyuan-dense hy_v4 joyai-llm", _deepseek3),
    ("spark2_5", _spark),
    ("afmoe", _afmoe),
    ("tekken", _tekken),
    ("gpt-4o llama4 kanana2 minimax-m2 talkie", _gpt4o),
    ("granite-embed-multi-97m", replace(_gpt4o, ignore_merges=True)),
    ("tiny_aya cohere2moe", _tiny_aya),
    ("youtu", _youtu),
    ("kimi-k2", _kimi_k2),
    ("superbpe", _superbpe),
    ("poro-chat bloom gpt3-finnish", _bloom),
    ("viking", _viking),
    ("chameleon", _chameleon),
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
