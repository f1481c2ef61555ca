#!/usr/bin/env python3
"""Writes tests/data/tokenizer/goldens.bin.gz: what Hugging Face `tokenizers` makes of random and nasty strings.

    python3 tools/reference/tokenizer_golden.py            (needs the Python package tokenizers 0.23, Unicode 16)

The vocabulary is Qwen3's, tests/data/tokenizer/qwen3_tokenizer.json.gz; a second tokenizer has the pattern of Qwen3.5 in it.

Layout, little-endian:
    u32 num_strings; u32 length in bytes of each; u32 hash of the Qwen3 tokens of each; u32 hash of the Qwen3.5 tokens of each;
    u32 hash of the text that the Qwen3 tokens decode to, for each; then all strings, one after the other;
    u32 num_sequences; for each, u32 hash of its decoded text with special tokens, u32 hash of it without them.
Sequence i has its token ids from SplitMix64(i), see random_ids(); tests/text/tokenizer_golden_test.cpp makes the same.
A hash is FNV-1a of 64 bits (ids as u32), its halves xor-ed.
"""
import gzip
import json
import pathlib
import random
import struct

from tokenizers import Regex, Tokenizer, normalizers

DATA = pathlib.Path(__file__).resolve().parents[2] / "tests/data/tokenizer"
QWEN3_5 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
NUM_STRINGS = 24000
NUM_SEQUENCES = 3000
MASK = (1 << 64) - 1


def fold(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 & MASK
    return (h >> 32) ^ (h & 0xFFFFFFFF)


def hash_ids(ids):
    return fold(struct.pack(f"<{len(ids)}I", *ids))


def hash_text(text):
    return fold(text.encode())


class SplitMix64:
    def __init__(self, seed):
        self.state = seed

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        return z ^ z >> 31


def random_ids(seed):
    """Single bytes (the ids below 256), all tokens, added tokens, and ids that are not defined."""
    rng = SplitMix64(seed)
    ids = []
    for _ in range(rng.next() % 24):
        kind, value = rng.next() % 8, rng.next()
        ids.append(value % 256 if kind < 5 else value % 151643 if kind < 7 else 151643 + value % 60)
    return ids


ATOMS = (
    [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\r", "\t", "\u00a0", "\u3000", "\u0085", "\u2028", "\u2009", "\x0b", "\x0c", "\x1c"]
    + ["'", "'s", "'S", "'\u017f", "'t", "'T", "'re", "'rE", "'VE", "'m", "'LL", "'ll", "'lL", "'d", "'x", "\u2019t", "''s", "'r", "'l"]
    + ["a", "B", "the", " of", "Hello", "world", "I", "don", "\u00e9", "\u00c5", "\u00df", "\u0130", "\ufb01", "\u0149", "\u212a", "\u2126"]
    + ["1", "23", "456", "\u0663", "\u00bd", "\u2167", "\u3007", "\U0001d7d8", "0x1F", "3.14", "1,000"]
    + ["\u4e2d", "\u6587\u5b57", "\u3042\u308a", "\u30ac", "\u30ab\u3099", "\uac01", "\u1100\u1161\u11a8", "\u1100\u1161", "\u0e01\u0e33", "\u0939\u093f\u0928"]
    + ["\u0301", "\u0323\u0307", "\u0307\u0323", "e\u0301", "\u093c", "\u0915\u093c", "\u094d", "\u064b\u0651", "\u0651\u064b", "\u20dd", "\u0f71\u0f72", "\u1ab0"]
    + ["\U0001f44d", "\U0001f3fd", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u200d", "\ufe0f", "\u2764\ufe0f", "\U0001f1e9\U0001f1ea", "\u200b", "\ufeff", "\u180e", "\u00ad"]
    + [".", ",", "!", "?!", "...", "->", "=>", "==", "::", "//", "/*", "*/", "()", "{", "}", "[", "]", ";", "_", "-", "--", "#", "$", "%", "&", "@", "\\", "`", "```", "\"", "<", ">", "</", "|"]
    + ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "<|im_end", "|im_end|>", "<|IM_END|>", "<|", "<think", "think>", "<|image_pad|>", "<|fim_prefix|>"]
    + ["\x00", "\x7f", "\ufdd0", "\ufffe", "\ufffd", "\ue000", "\U000f0000", "\U0010ffff", "\U00050000", "\U0001e4d0", "\U00011f04", "\U00031350", "\U0002ebf0", "\U00010d50"]
)
WORDS = (
    "the quick brown fox jumps over lazy dogs while it's raining and we'll see they've gone I'm sure you'd say DON'T "
    "naïve café façade Ångström Straße über coöperate piñata œuvre İstanbul ǅ "
    "быстрая коричневая лиса прыгает через ленивую собаку ёлка й "
    "η γρήγορη αλεπού πηδάει ὀξύς ᾄδω "
    "שָׁלוֹם עולם مرحبا بالعالم العَرَبِيَّة سلام دنیا "
    "नमस्ते दुनिया क़िला বাংলা தமிழ் తెలుగు ಕನ್ನಡ മലയാളം සිංහල "
    "สวัสดีชาวโลก ພາສາລາວ မြန်မာ ភាសាខ្មែរ བོད་ཡིག "
    "今日は良い天気ですね。 東京タワー ｶﾀｶﾅ 敏捷的棕色狐狸跳过懒狗 繁體中文 안녕하세요 세계 한글 "
    "tiếng Việt Tiếng_Việt მადლობა շնորհակալություն አማርኛ ᏣᎳᎩ ᠮᠣᠩᠭᠣᠯ 𞤀𞤁𞤂 𐌰𐌱 "
).split()
CODE = [
    "def {n}(self, {n}: int = {d}) -> None:\n", "    return {n}[{d}:{d}] if {n} else None\n", "for (int {n} = 0; {n} < {d}; ++{n}) {{\n",
    "\t{n}->{n}({n}, &{n});\n", "#include <{n}.h>\r\n", "// {n}: {n}'s {d}\n", "{n}::{n}<{n}> {n}{{}};", "const {n} = async ({n}) => {{ await {n}?.{n}(); }};\n",
    '{{"{n}": {d}, "{n}": [true, null, -{d}.{d}e-{d}]}}\n', "SELECT * FROM {n} WHERE {n} >= {d} AND {n} != '{n}';\n", "| {n} | {d} |\n|---|---|\n",
    "- [ ] **{n}** `{n}` _{n}_\n\n\n", "<div class=\"{n}\">{n}</div>\n", "$ {n} --{n}={d} | grep -v '{n}' > /tmp/{n}.{d} 2>&1\n", "0x{d}ff << {d} ^ ~{n}; /* {n} */   \n",
    "let {n}: Vec<&'a str> = {n}!(\"{n}\\n\");\n", "\\frac{{{n}}}{{{d}}} \\cdot x^{{{d}}}", "https://{n}.com/{n}?{n}={d}&{n}=%20{n}#{n}", "        \n    }}\n\n}}\n",
]
RUNS = ["a", " ", "\n", " \n", "\t ", "\u0301", "e\u0301\u0323", "1", "=", "-=", "\u4e2d", "\U0001f600", "ab", "Aa ", "\u3000", "\r\n", "'s", "\u0939\u094d", "\U0001f468\u200d", "<|im_end|>", "lol", "\u00a0\u00a0x"]


def make_strings():
    rng = random.Random(20260)
    points = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    below = {limit: [c for c in points if c < limit] for limit in (0x250, 0x3000, 0x30000)}
    plane1 = [c for c in points if 0x10000 <= c < 0x20000]
    no_marks = normalizers.Replace(Regex(r"\p{M}"), "")
    marks = [c for c in points if not no_marks.normalize_str(chr(c))]

    def name():
        return rng.choice(["i", "x", "foo", "my_var", "camelCase", "HTTPServer2", "_tmp", "größe", "变量", "kMax", "a1b2", "self", "value", "README", "id"])

    def nasty():
        return "".join(rng.choice(ATOMS) for _ in range(rng.randint(1, 14)))

    def scattered():
        pools = [below[0x250], below[0x3000], below[0x30000], plane1, points, marks, marks]
        return "".join(chr(rng.choice(rng.choice(pools))) if rng.random() < 0.85 else rng.choice(ATOMS) for _ in range(rng.randint(1, 10)))

    def neighbours():
        """Code points side by side: a part of a script's block with its marks, numbers and holes."""
        first = rng.choice([rng.randrange(0x3400), rng.randrange(0xA000, 0xABFF), rng.randrange(0xF900, 0x20000), rng.randrange(0x110000)])
        return "".join(chr(c) for c in range(first, first + rng.randint(2, 24)) if c < 0xD800 or 0xDFFF < c < 0x110000)

    def prose():
        glue = [" ", " ", " ", "  ", ", ", ". ", "\n", "", "-", "/", "'s "]
        return "".join(rng.choice(WORDS) + rng.choice(glue) for _ in range(rng.randint(1, 12)))

    def code():
        return "".join(" " * rng.choice([0, 0, 2, 4, 8]) + rng.choice(CODE).format(n=name(), d=rng.randrange(2000)) for _ in range(rng.randint(1, 3)))

    def blanks():
        return "".join(rng.choice(ATOMS[:16]) if rng.random() < 0.8 else rng.choice("a1.\u0301\u4e2d") for _ in range(rng.randint(1, 20)))

    def run():
        return "".join(rng.choice(RUNS) * rng.choice([1, 5, 47, 48, 49, 300, 2000]) for _ in range(rng.randint(1, 3)))

    kinds, weights = [nasty, scattered, neighbours, prose, code, blanks, run], [36, 24, 8, 10, 12, 8, 2]
    strings = ["", *map(chr, range(0x250)), *ATOMS, *WORDS]
    strings.append("".join(map(chr, marks)))  # every mark there is, in one string
    strings += [a + b for a in ("'", "x'", " '", "''") for b in ("s", "S", "\u017f", "sx", "re", "r", "lL", "LLL", "ve", "V", "m1", "d.", "\u0301s")]
    seen = dict.fromkeys(strings)
    while len(seen) < NUM_STRINGS:
        seen[rng.choices(kinds, weights)[0]()] = None
    return list(seen)


def main():
    shipped = json.loads(gzip.open(DATA / "qwen3_tokenizer.json.gz").read())
    qwen3 = Tokenizer.from_str(json.dumps(shipped))
    shipped["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = QWEN3_5
    qwen3_5 = Tokenizer.from_str(json.dumps(shipped))

    strings = make_strings()
    encoded = [s.encode() for s in strings]
    ids = [e.ids for e in qwen3.encode_batch(strings, add_special_tokens=False)]
    ids_3_5 = [e.ids for e in qwen3_5.encode_batch(strings, add_special_tokens=False)]
    n = len(strings)
    out = struct.pack("<I", n)
    for column in (map(len, encoded), map(hash_ids, ids), map(hash_ids, ids_3_5),
                   (hash_text(qwen3.decode(i, skip_special_tokens=False)) for i in ids)):
        out += struct.pack(f"<{n}I", *column)
    out += b"".join(encoded)
    out += struct.pack("<I", NUM_SEQUENCES)
    for seed in range(NUM_SEQUENCES):
        sequence = random_ids(seed)
        out += struct.pack("<2I", *(hash_text(qwen3.decode(sequence, skip_special_tokens=skip)) for skip in (False, True)))
    path = DATA / "goldens.bin.gz"
    path.write_bytes(gzip.compress(out, 9, mtime=0))
    differ = sum(a != b for a, b in zip(ids, ids_3_5))
    print(f"{n} strings ({differ} differ between the patterns), {NUM_SEQUENCES} sequences, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
