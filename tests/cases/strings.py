"""Texts that tokenizers get wrong, made the same way on every machine and every Python version.

Only `Random.random()` is used: it alone is promised to give the same numbers for a seed.
"""

# ruff: noqa: E501 (texts)

import random
import unicodedata
from collections.abc import Callable, Iterator, Sequence

_WORDS: dict[str, list[str]] = {
    "english": "the quick brown fox didn't jump; they'll I'M WE'VE can't O'Neil rock'n'roll co-op "
    "naïve façade antidisestablishmentarianism Mr. e.g. U.S.A. iPhone HTTPServer snake_case".split(),
    "german": "Straße größte Überraschung Donaudampfschifffahrtsgesellschaft ÄÖÜ ẞ fließend".split(),
    "french": "l'été où œuvre Noël çà aujourd'hui qu'il «guillemets» ÉCOLE".split(),
    "turkish": "İstanbul ığdır çöğüş Türkiye'nin ŞİİR ılık".split(),
    "polish": "zażółć gęślą jaźń Łódź ŻÓŁĆ".split(),
    "vietnamese": "Tiếng Việt đường phố nghĩa những ngày".split(),
    "russian": "Привет, мир! Съешь ещё этих мягких французских булок ЁЖ подъезд".split(),
    "ukrainian": "Їжак об'єднання ґанок здоров'я".split(),
    "greek": "Καλημέρα κόσμε Ὀδυσσεύς ἄνθρωπος ΣΊΣΥΦΟΣ ς".split(),
    "arabic": "السلام عليكم اَلْعَرَبِيَّةُ مدرسة ١٢٣ ٤٥٦ لا، نعم؟".split(),
    "persian": "می‌خواهم کتاب‌ها گفت‌وگو ۱۴۰۲ پرسش؟".split(),
    "hebrew": "שלום עולם שָׁלוֹם תל־אביב ירושלים".split(),
    "hindi": "नमस्ते दुनिया हिन्दी क्षत्रिय ज़िन्दगी १२३ श्री।".split(),
    "bengali": "বাংলা ভাষা নমস্কার ক্ষমা ৪৫৬".split(),
    "telugu": "తెలుగు భాష నమస్కారం శ్రీకృష్ణదేవరాయలు విద్యార్థి ౧౨౩ క్ష్మ".split(),
    "tamil": "தமிழ் வணக்கம் ஸ்ரீ கற்றுக்கொள்ளுங்கள்".split(),
    "kannada": "ಕನ್ನಡ ನಮಸ್ಕಾರ ಕ್ಷೇತ್ರ".split(),
    "malayalam": "മലയാളം നമസ്കാരം ന്‍റെ ക്ഷേത്രം".split(),
    "thai": "สวัสดีชาวโลก ภาษาไทย น้ำ ๑๒๓ กรุงเทพมหานคร".split(),
    "lao": "ສະບາຍດີ ພາສາລາວ".split(),
    "khmer": "សួស្តី ភាសាខ្មែរ ព្រះរាជាណាចក្រ".split(),
    "burmese": "မင်္ဂလာပါ မြန်မာဘာသာ".split(),
    "tibetan": "བཀྲ་ཤིས་བདེ་ལེགས། བོད་ཡིག".split(),
    "georgian": "გამარჯობა საქართველო ᲡᲐᲥᲐᲠᲗᲕᲔᲚᲝ".split(),
    "armenian": "Բարեւ աշխարհ և ԵՐԵՎԱՆ".split(),
    "amharic": "ሰላም ዓለም አማርኛ፡ ፩፪፫".split(),
    "chinese": "你好世界 我们今天去北京参观故宫博物院 龘靐 繁體中文測試 ，。！？ 一二三 〇".split(),
    "japanese": "こんにちは世界 カタカナ ひらがな 漢字かな交じり文 ﾊﾝｶｸ ー々〆ヶ 「引用」".split(),
    "korean": "안녕하세요 세계 한국어 뷁쉙 ㅋㅋㅋ ㅎㅎ 조선글".split(),
    "cherokee": "ᏣᎳᎩ ᎦᏬᏂᎯᏍᏗ ꭳꮟᏺ".split(),
    "mongolian": "ᠮᠣᠩᠭᠣᠯ Сайн байна уу".split(),
}

_EMOJI = (
    "😀 👩‍👩‍👧‍👦 👍🏽 👩🏿‍🚀 🏳️‍🌈 🏴󠁧󠁢󠁳󠁣󠁴󠁿 🇩🇪 🇮🇳🇯🇵 ❤️ ❤ ☎︎ 1️⃣ #️⃣ 🧑🏻‍🤝‍🧑🏾 🫠 🪿 ♟️ ⚧ ✂️✂ 🤦🏼‍♂️ ©️ ™ ‼️ 🥲🥲🥲"
).split()

_LOOKALIKES = (
    "<|endoftext|> <|im_start|> <|im_end|> <|im_end| |im_end|> <|im_start|>system <|eot_id|> <s> </s> "
    "<bos> <eos> <pad> <unk> <mask> <unused0> <unused6241> <unused6242> <start_of_turn> <end_of_turn> "
    "<end_of_turn>model <start_of_image> [multimodal] [INST] [/INST] <0x41> <0x0A> <0xFF> <0xZZ> "
    "<repo_name> <file_sep> <|im_end|><|im_end|> <<bos>> <bos<bos>> Ġ Ċ ĠĠ Ã Â â▁ ▁ ▁▁ ▁a <table> </td> "
    "<b></b> <h1>x</h1> <br/> <|IM_END|> <|im_end|>\n <bos>\n\n"
).split(" ")

_SPACES = [
    *" \t\n\r\v\f",
    "\r\n",
    "\u00a0",
    "\u0085",
    "\u1680",
    "\u2002",
    "\u2003",
    "\u2009",
    "\u200b",
    "\u200d",
    "\u2028",
    "\u2029",
    "\u202f",
    "\u205f",
    "\u2060",
    "\u3000",
    "\ufeff",
    "\x1c",
    "\x1f",
]

_PUNCTUATION = (
    list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") + "… — – “ ” ‘ ’ « » ¿ ¡ § ¶ † ‡ • ‰".split()
) + "€ £ ¥ ₹ ± × ÷ ≠ ≤ ∞ ∑ √ ∂ → ⇒ ½ ¾ ² ³ ⁴ Ⅷ ① ㊿ ㎏ ﬁ ﷺ ª º µ".split()

# First and last code point: scripts, symbols, private use, unassigned, noncharacters, planes 1 to 16.
_RANGES = [
    (0x01, 0x1F),
    (0x7F, 0x9F),
    (0xA0, 0x24F),
    (0x250, 0x2FF),
    (0x300, 0x36F),
    (0x370, 0x52F),
    (0x530, 0x7FF),
    (0x900, 0xDFF),
    (0xE00, 0x1FFF),
    (0x2000, 0x2BFF),
    (0x2C00, 0x2FFF),
    (0x3000, 0x33FF),
    (0x3400, 0x9FFF),
    (0xA000, 0xABFF),
    (0xAC00, 0xD7FF),
    (0xE000, 0xF8FF),
    (0xF900, 0xFFFF),
    (0x10000, 0x10FFF),
    (0x11000, 0x16FFF),
    (0x17000, 0x1CFFF),
    (0x1D000, 0x1DFFF),
    (0x1E000, 0x1FFFF),
    (0x20000, 0x323AF),
    (0x40000, 0xDFFFF),
    (0xE0000, 0xE01EF),
    (0xF0000, 0x10FFFF),
]

_CODE = [
    'def {a}({b}, *, {c}=None):\n    """{A} the {b}."""\n    if {b} is not {c} and {n} <= {m}:\n'
    '        return {{"{a}": [{n}, {m:.3f}], **{b}}}\n    raise ValueError(f"{{{b}!r}}")\n',
    "class {A}{B}({C}):\n\t{a}: int = {n}\n\n\t@property\n\tdef {b}(self) -> list[{C}]:\n\t\tpass\n",
    "for (int {a} = 0; {a} < {n}; ++{a}) {{\r\n  {b}[{a}] += {c}->{a} * 0x{n:X}; // {A} {B}\r\n}}\r\n",
    '#include <{a}.h>\n#define {AA}_{BB} ({n} << 3)\nstatic const char *{b} = "\\t%{c}\\n\\0";\n',
    '{{"{a}": {n}, "{b}": [true, null, -{m}e-{n}], "{c}": {{"{A}": "\\u00e9\\n"}}}}',
    '<div class="{a} {b}"><a href="https://{c}.example/{a}?q={n}&amp;{b}=1">{A}</a>\n\n</div>',
    "SELECT {a}, COUNT(*) AS {b} FROM {c} WHERE {a} >= {n} AND {b} LIKE '%{A}%' -- {B}\n  LIMIT {n};",
    "let {a} = |{b}: &'a str| -> Option<{A}> {{ Some({b}?.{c}::<{B}>({n}_u32)) }};",
    "$ {a} --{b}={n} -{c[0]} ~/.{c}/{a}_{b}.tar.gz | grep -E '^[^#]+${n}' > /dev/null 2>&1 && echo $?\n",
    "{a} := func({b} ...{A}) (<-chan {C}, error) {{\n\t\t\tgo {c}()\n\t}}\n",
    "| {A} | {B} |\n|:---|---:|\n| `{a}` | **{n}** |\n\n## {C}\n\n1. {b}\n   - [x] {c}\n",
    "\\frac{{{a}}}{{{n}}} \\sum_{{i=1}}^{{{n}}} x_i^2 \\leq \\|{b}\\|_{{\\infty}} $${m}$$",
]


class _Draw:
    """Choices made with `random()` alone."""

    def __init__(self, seed: int):
        self._random = random.Random(seed).random

    def below(self, n: int) -> int:
        return int(self._random() * n)

    def pick(self, items: Sequence):
        return items[self.below(len(items))]

    def some(self, most: int, make: Callable[[], str], sep: str = "") -> str:
        return sep.join(make() for _ in range(1 + self.below(most)))


def _identifier(draw: _Draw) -> str:
    part = "get set num max item index value tmp cfg utf8 x y i node tree parse lex Token ID io".split()
    return draw.pick(["_", "", ""]).join(draw.pick(part) for _ in range(1 + draw.below(3)))


def _code(draw: _Draw) -> str:
    a, b, c = (_identifier(draw) for _ in range(3))
    names = {"a": a, "b": b, "c": c, "A": a.title(), "B": b.title(), "C": c.capitalize()}
    numbers = {"n": draw.below(10 ** (1 + draw.below(6))), "m": draw.below(10**6) / 1000}
    filled = draw.pick(_CODE).format(**names, **numbers, AA=a.upper(), BB=b.upper())
    return filled.replace("    ", draw.pick(["    ", "  ", "\t", "        "]))


def _prose(draw: _Draw) -> str:
    words = _WORDS[draw.pick(sorted(_WORDS))]
    return draw.some(12, lambda: draw.pick(words), draw.pick([" ", " ", " ", "", "  ", ", ", "\n"]))


def _numbers(draw: _Draw) -> str:
    digits = draw.pick(
        ["0123456789", "0123456789", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "０１２３４５６７８９", "②Ⅸ½²"]
    )
    run = draw.some(14, lambda: draw.pick(digits))
    return draw.pick(
        ["{}", " {}", "${}.99", "-{}e+{}", "{}%", "x{}y", "{}:{}", "{},000", "v{}.{}"]
    ).replace("{}", run)


def _emoji(draw: _Draw) -> str:
    return draw.some(6, lambda: draw.pick(_EMOJI), draw.pick(["", " "]))


def _whitespace(draw: _Draw) -> str:
    def run() -> str:
        return draw.pick(_SPACES) * (1 + draw.below(draw.pick([2, 4, 40])))

    return (
        draw.pick(["", "a", "x=", "1", "."]) + draw.some(4, run) + draw.pick(["", "b", "\n", "2"])
    )


def _accents(draw: _Draw) -> str:
    words = [w for k in ("french", "vietnamese", "german", "korean", "greek") for w in _WORDS[k]]
    form = draw.pick(["NFC", "NFD"])
    return unicodedata.normalize(form, draw.some(5, lambda: draw.pick(words), " "))


def _code_points(draw: _Draw) -> str:
    def one() -> str:
        first, last = draw.pick(_RANGES)
        code = first + draw.below(last - first + 1)
        return chr(code) if not 0xD800 <= code < 0xE000 else "\ufffd"

    return draw.some(8, one)


def _marks(draw: _Draw) -> str:
    marks = "\u0301\u0308\u0323\u20dd\u0c4d\u0c3f\u093c\u0e48\u064b\ufe0f\u200d\U0001f3fd"
    return draw.some(4, lambda: draw.pick(["", "a", " ", "క", "é", "\ufffd"]) + draw.pick(marks))


def _lookalike(draw: _Draw) -> str:
    return draw.some(3, lambda: draw.pick(_LOOKALIKES), draw.pick(["", " ", "x", "\n"]))


def _long(draw: _Draw) -> str:
    return draw.pick(["a", "ab", "x1", "é", "字", "=-", "అ", "🙂", "http", "Ab'"]) * (
        1 + draw.below(400)
    )


def _punctuation(draw: _Draw) -> str:
    return draw.some(
        10, lambda: draw.pick(_PUNCTUATION) * (1 + draw.below(3)), draw.pick(["", " "])
    )


_MAKERS = (
    _prose,
    _prose,
    _code,
    _numbers,
    _emoji,
    _whitespace,
    _accents,
    _code_points,
    _marks,
    _lookalike,
    _punctuation,
)


def _mixture(draw: _Draw) -> str:
    return draw.some(4, lambda: draw.pick(_MAKERS)(draw), draw.pick(["", " ", "\n"]))


def _literals() -> Iterator[str]:
    yield ""
    yield from _SPACES
    yield from _EMOJI
    yield from _LOOKALIKES
    yield from _PUNCTUATION
    yield from map(chr, range(1, 0x180))
    yield from (
        "\ufffd",
        "a\ufffdb",
        "\ufffe",
        "\U0010ffff",
        "\ue000",
        "\u0378",
        "e\u0301",
        "\u0301",
    )
    for words in _WORDS.values():
        yield from words
        yield " ".join(words)


def strings(count: int = 12_000, seed: int = 20_240_229) -> list[str]:
    """`count` texts without NUL and without lone surrogates: every literal once, then drawn ones."""
    draw = _Draw(seed)
    out = list(_literals())
    makers = (*_MAKERS, _mixture, _mixture, _mixture)
    while len(out) < count:
        maker = _long if draw.below(60) == 0 else draw.pick(makers)
        out.append(maker(draw))
    return out[:count]


def word_cut_strings() -> list[str]:
    """Every eighth of `strings`, and what one or two pre-tokenizers alone have an expression for."""
    draw = _Draw(7)
    out = strings()[::8]
    out += [f"{'7' * n}{after}" for n in range(1, 12) for after in ("", " ", "x", ".5", "\n1")]
    out += [f"a{' ' * n}{after}" for n in (1, 2, 3, 7, 8, 9, 31, 33, 300, 600) for after in "b\n."]
    out += [
        "<sentinel:12>x <sentinel:x>",
        "IMGIMGABCZx IMGIMGABCDEZ",
        "\t\ta\t b",
        "a\r\nb\r\n\r\n ",
    ]
    out += [
        "한국어 말 ㄱㅏ ㅣ",
        "ㄅㄆㄇ注音",
        "（全角）！，。…“”",
        "漢字かな カナ ｶﾅ",
        "ສະບາຍດີ ไทย ខ្មែរ မြန်မာ",
    ]
    out += [
        "x`y` `z`",
        "a|b^c$d<e>f=g+h~i",
        "'S'T'RE'VE'M'LL'D it'S We'Re",
        "#if ~foo @bar \\baz {x}",
    ]
    out += [
        "a. b! c? d, e(f) g[h] i",
        "नमस्ते। شكرا، ۔",
        "1,234,567.89 12345678 ٣٤٥٦",
        "a/b//\n/c\r/",
    ]
    digits = lambda: draw.some(9, lambda: draw.pick("0123456789"))
    out += [draw.some(4, digits, draw.pick([" ", ",", "a", "\n", "."])) for _ in range(150)]
    return out
