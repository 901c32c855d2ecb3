"""Text of every kind that tells tokenizers apart."""

from __future__ import annotations

from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[3]
PIECES = (
    *(
        "\U0001f600",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\U0001f1eb\U0001f1f7",
        "\u2764\ufe0f",
    ),
    *(" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", " \n ", "\u00a0", "\u3000", "\u2009"),
    *(
        "0",
        "7",
        "42",
        "1234567",
        "3.14159",
        "1e-5",
        "0x7fc00000",
        "\u0663\u0664",
        "\u00bd",
        "\u2167",
    ),
    *("def f(x):", "return x**2", "if (a && !b) {", "};", "<div>", "#include", "a_b", "camelCase"),
    *(
        "HTTPServer",
        "x=>y",
        "'''",
        '"""',
        "//",
        "...",
        "!!",
        "--",
        "it's",
        "WE'LL",
        "don\u2019t",
        "'S",
    ),
    *("\u4f60\u597d", "\u4e16\u754c", "\u3053\u3093\u306b\u3061\u306f", "\ud55c\uad6d\uc5b4"),
    *("\u0939\u093f\u0928\u094d\u0926\u0940", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629"),
    *(
        "\u05e2\u05d1\u05e8\u05d9\u05ea",
        "\u0420\u0443\u0441\u0441\u043a\u0438\u0439",
        "\u0e44\u0e17\u0e22",
    ),
    *(
        "\u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac",
        "na\u00efve",
        "e\u0301",
        "stra\u00dfe",
        "\u01c5",
    ),
    *("\u2581", "\u0000", "\u007f", "\u200b", "\ufeff", "\U0001d54f", "\U000e0041", "\ufffd"),
    *("the", "Lord", "beginning", "aaaaaaaa", "abcabcabc", "<0x41>", "<unk>", "[INST]"),
)


def mixed_lines(count: int) -> list[str]:
    """Lines of prose, of code, and of pieces of all kinds at random, a third each."""
    rng = Random(7)
    prose = (ROOT / "fixtures" / "held-out.txt").read_text().splitlines()
    code = (ROOT / "reference" / "attention.py").read_text().splitlines()
    lines = []
    for index in range(count):
        if index % 3 < 2:
            lines.append((prose, code)[index % 3][index // 3 % len((prose, code)[index % 3])])
        else:
            pieces = [rng.choice(PIECES) for _ in range(rng.randrange(1, 30))]
            lines.append(rng.choice(["", " "]).join(pieces))
    return lines
