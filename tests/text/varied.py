"""Varied texts for comparing tokenizers: hand-written ones, and joins of them from a fixed seed."""

from __future__ import annotations

import random

TEXTS = (
    "", " ", "  ", "\t", "\n", "\r\n", " \n ", "\n\n\n", "a\r\n\r\nb", "\u00a0x", "x\u3000y",
    "\u200b\u200d", "\ufeffbom", "1", "12", "123", "1234567890", "\n1", "\n12\n34", " 1 22  333",
    "3.14159", "-1e-05", "1,234,567.89", "٣٤٥", "½Ⅷ²", "Line\n2024 was", "in 2024, 12% of 50km",
    "0x1F 0b101", "v1.2.3-rc4", "(555) 123-4567", "10:30pm", "a1b2c3",
    "It's we're I'll they'd you've I'm don't", "IT'S WE'RE", "rock'n'roll 'tis", "''''", "...", "!?!?",
    "--- *** ___", "def f(x):\n    return x ** 2\n", "if (a&&b||c) { d[i]++; }\t// ok",
    "<html>\n\t<p>hi</p>\n</html>", "SELECT * FROM t;", '{"a": [1, 2, {"b": null}]}', "C:\\dir\\file.txt",
    "https://ex.org/a?b=c&d=%20#e", "x@y.org", "#!/bin/sh\n\techo $1", "😀", "👨‍👩‍👧‍👦", "🇩🇪🇫🇷", "❤️🔥",
    " 🙂 x", "日本語のテキスト", "中文123字符", "한국어 텍스트", "Привет, мир", "שלום עולם",
    "مرحبا بالعالم", "नमस्ते", "ภาษาไทย", "e\u0301 o\u0308\u0304 n\u0303", "Z\u0351\u036b\u0343a",
    "naïve café", "ﬁ ﬂ Å", "<|im_start|>user\nhi<|im_end|>\n", "<|im_start", "<|endoftext|>",
    "<|endoftext|>x", "< |im_end|>", "<|im_end|>1", "<repo_name>a/b", "<file_sep>", "<s></s>", "x" * 300,
    "ab" * 100, " " * 65, "\n" * 33, "a" + " " * 17 + "b", "A\x00B\x07",
)
"""Texts at which tokenizers usually differ: digits, blanks, code, scripts, emoji, marks, special-token-like text."""

_PIECES = (
    *TEXTS[1:], "the", " of", "and ", "Hello", " world", "’s", "Straße", " x=", "9", "2048", "\n42.",
    "    ", "\t\t", "ñ", "𝔘𝔫𝔦", "\U0001f9d1\u200d\U0001f4bb", "ŁÓDŹ", "'S", "n't", "\x85", "\u2028",
)


def varied_texts(count: int) -> list[str]:
    """So many different texts: the hand-written ones, then joins of 2 to 8 pieces of them, from a fixed seed."""
    generator = random.Random(20250304)
    texts = dict.fromkeys(TEXTS)
    while len(texts) < count:
        texts["".join(generator.choices(_PIECES, k=generator.randint(2, 8)))] = None
    return list(texts)[:count]
