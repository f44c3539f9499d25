"""Spellings of mathematical text -> one spelling. Owns Unicode, math mode, spaces, fractions, text commands and digits.

Nothing that carries a value is dropped here: a unit, a base or a constant stays in the text.
"""

from __future__ import annotations

import re
import unicodedata

FUNCTIONS = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "sinh",
        "cosh",
        "tanh",
        "coth",
        "arcsin",
        "arccos",
        "arctan",
        "arccot",
        "arcsec",
        "arccsc",
        "log",
        "ln",
        "lg",
        "exp",
        "max",
        "min",
        "gcd",
        "lcm",
        "det",
        "sgn",
        "sup",
        "inf",
        "lim",
        "dim",
        "ker",
        "arg",
        "deg",
        "floor",
        "ceil",
        "sqrt",
        "mod",
    ]
)
_GREEK = {
    chr(code): "\\" + unicodedata.name(chr(code)).split()[-1].lower().replace("lamda", "lambda") + " "
    for code in range(0x3B1, 0x3CA)
    if code not in (0x3BF, 0x3C2)
}
_CHARACTERS = {
    **_GREEK,
    **dict.fromkeys("−‒–—﹣－⁻", "-"),
    **dict.fromkeys("×✕✖⨯", "\\times "),
    **dict.fromkeys("·⋅∙•∗", "\\cdot "),
    **dict.fromkeys("÷∕⁄", "/"),
    **dict.fromkeys("’‘′ʹ", "'"),
    **dict.fromkeys("“”″", '"'),
    **dict.fromkeys("⟨〈", "\\langle "),
    **dict.fromkeys("⟩〉", "\\rangle "),
    **dict.fromkeys("º˚°", "\\degree "),
    **{"℃": "\\degree C", "℉": "\\degree F"},
    **{"∞": "\\infty ", "√": "\\sqrt ", "±": "\\pm ", "∓": "\\mp ", "≈": "\\approx ", "∅": "\\emptyset "},
    **{"≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≡": "\\equiv ", "∈": "\\in ", "∪": "\\cup ", "∩": "\\cap "},
    **{"→": "\\to ", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}"},
    **{
        "∠": "\\angle ",
        "△": "\\triangle ",
        "∆": "\\Delta ",
        "∖": "\\setminus ",
        "Ω": "\\Omega ",
        "Δ": "\\Delta ",
    },
    **{"，": ",", "、": ",", "：": ":", "；": ";", "％": "\\% ", "\u200b": "", "\ufeff": "", "\u2060": ""},
}
_RAISED = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁱⁿ]+")
_LOWERED = re.compile(r"[₀₁₂₃₄₅₆₇₈₉₊₋]+")
_PART = re.compile(r"[¼½¾⅐-⅞]")

_SIZES = re.compile(
    r"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits|mathstrut|strut)"
    r"(?![A-Za-z])(?:\.(?![0-9]))?|\\!|\\phantom\{[^{}]*\}"
)
_MATH_MODE = re.compile(r"\$\$(.*?)\$\$|\$((?:[^$\\]|\\.)*)\$|\\\((.*?)\\\)|\\\[(.*?)\\\]", re.DOTALL)
_SPACE = re.compile(
    r"(?<!\\)\\(?:[,;:> \n]|(?:quad|qquad|enspace|enskip|thinspace|medspace|thickspace|space|newline)(?![A-Za-z])"
    r"|hspace\*?\{[^{}]*\})|~|\s+|\\\\(?=\s*$)"
)
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up|md)?|[mh]box|math(?:rm|bf|it|sf|tt|normal)|operatorname\*?|emph|rm|bf|it"
    r"|boldsymbol|bm|pmb)(?![A-Za-z])\s*\{((?:[^{}]|\x00\{[^{}]*\})*)\}"
)
_FONT = re.compile(r"\{\s*\\(?:rm|bf|it|sf|tt)(?![A-Za-z])\s*([^{}]*)\}")
_FRACTION = re.compile(r"\\(?:[dtc]?frac|nicefrac|sfrac)(?![A-Za-z])\s*")
_OVER = re.compile(r"\{([^{}]*)\\over(?![A-Za-z])\s*([^{}]*)\}")
_NAMES = {
    **dict.fromkeys(("leq", "leqslant", "leqq"), "le"),
    **dict.fromkeys(("geq", "geqslant", "geqq"), "ge"),
    **dict.fromkeys(("lt",), "<"),
    **dict.fromkeys(("gt",), ">"),
    **{
        "neq": "ne",
        "varnothing": "emptyset",
        "lbrace": "{",
        "rbrace": "}",
        "ast": "cdot",
        "div": "/",
        "colon": ":",
    },
    **{
        "imath": "i",
        "rightarrow": "to",
        "backslash": "setminus",
        "lbrack": "[",
        "rbrack": "]",
        "pounds": "£",
    },
    **{"varepsilon": "epsilon", "varphi": "phi", "vartheta": "theta", "cdotp": "cdot", "dagger": "dagger"},
}
_PLAIN_SYMBOLS = {"<", ">", "/", ":", "i", "[", "]", "£"}
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\(?:degree|textdegree)s?(?![A-Za-z])\s*")
_BARE_NAME = re.compile(
    r"(?<![\\A-Za-z])(pi|infinity|oo|" + "|".join(sorted(FUNCTIONS - {"inf"})) + r")(?![A-Za-z])"
)
_POWER = re.compile(r"\^\s*(?:\(([^()]*)\)|([-+]?[0-9]+(?:\.[0-9]+)?(?:/[0-9]+)?))")
_ROOT = re.compile(r"\\sqrt\s*(?:\(((?:[^()]|\([^()]*\))*)\)|([0-9]+(?:\.[0-9]+)?|[A-Za-z]))")
_GROUPS = re.compile(
    r"(?<![0-9.,])(?<![0-9][ '_])([0-9]{1,3})(([ '_]|, ?)[0-9]{3}(?:\3[0-9]{3})*)(?![0-9])(?!,[0-9])"
)


def tidy(text: str) -> str:
    """`text` in one spelling: ASCII digits and signs, no math mode, single spaces, `\\frac{a}{b}`, `\\text{words}`,
    `\\degree`, `^{n}`, numbers without separators, `\\dollar` for a currency's `$`."""
    text = _characters(text.strip())
    text = text.replace("\\$", "\\dollar ").replace("\\\\%", "\\%")
    text = _MATH_MODE.sub(lambda m: " " + next(part for part in m.groups() if part is not None) + " ", text)
    text = text.replace("$", "\\dollar ").replace("{,}\\!", "{,}").replace(",\\!", "{,}").replace("{:}", ":")
    text = _SPACE.sub(" ", _SIZES.sub(" " if "\\right" in text and "\\begin" in text else "", text)).strip()
    text = re.sub(r"\\log\s*_\s*(?:e(?![A-Za-z])|\{\s*e\s*\})", r"\\ln ", _COMMAND.sub(_renamed, text))
    text = re.sub(r"(?<!\\)%", r"\\%", _DEGREE.sub(r"\\degree ", text))
    text = _texts(_FONT.sub(r"\\mathrm{\1}", text))
    text = re.sub(r"\*\*|(?<!\\)\*", lambda m: "^" if m[0] == "**" else "\\cdot ", text)
    text = _BARE_NAME.sub(
        lambda m: {"oo": "\\infty "}.get(m[1], "\\infty " if m[1] == "infinity" else f"\\{m[1]} "), text
    )
    text = _OVER.sub(r"\\frac{\1}{\2}", text)
    text = _fractions(_POWER.sub(_braced, _ROOT.sub(_rooted, text)))
    text = _separators(re.sub(r"(?<!\d)_\s*([0-9]+)", r"_{\1}", text))
    text = re.sub(r"(?<![0-9A-Za-z})\]])\+\s*(?=\\infty)", "", " ".join(text.split()))
    return text.strip().rstrip(",;").rstrip(".").rstrip()


def _characters(text: str) -> str:
    """Unicode's ways to write mathematics in LaTeX, with ASCII digits."""
    if text.isascii():
        return text
    text = _PART.sub(lambda m: _part(m[0]), text)
    text = _RAISED.sub(lambda m: f"^{{{_plain_digits(m[0])}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{_plain_digits(m[0])}}}", text)
    text = "".join(_CHARACTERS.get(character, character) for character in text)
    return "".join(
        str(unicodedata.decimal(c)) if c.isdecimal() else c for c in unicodedata.normalize("NFKC", text)
    )


def _part(character: str) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", character).partition("⁄")
    return f" \\frac{{{top}}}{{{bottom}}}" if bottom else character


def _plain_digits(text: str) -> str:
    return unicodedata.normalize("NFKC", text).replace("−", "-")


def _renamed(command: re.Match[str]) -> str:
    name = _NAMES.get(command[1])
    if name is None:
        return command[0]
    return f" {name} " if name in _PLAIN_SYMBOLS else f"\\{name}" + ("" if name in "{}" else " ")


def _texts(text: str) -> str:
    """`\\text{...}` for words and units in any font. A single letter in a font is the letter; sin is `\\sin`."""
    for _ in range(4):  # fonts in fonts
        if (new := _TEXT.sub(_text, text)) == text:
            break
        text = new
    return text.replace("\x00", "\\text")


def _text(match: re.Match[str]) -> str:
    inner, command = re.sub(r"\x00\{([^{}]*)\}", r"\1", match[1]), match[0].split("{")[0].strip("\\ ")
    word = inner.strip()
    if "\\" in inner or not re.search("[A-Za-z]", inner):
        return f" {inner} "
    if word in FUNCTIONS and not command.startswith(("text", "mbox", "hbox")):
        return f"\\{word} "
    letter = len(word) == 1 and (
        (word in "ie" and inner == word) or not command.startswith(("text", "mbox", "mathrm"))
    )
    return f" {word} " if letter else "\x00{" + inner + "}"


def _braced(match: re.Match[str]) -> str:
    return f"^{{{match[1] if match[1] is not None else match[2]}}}"


def _rooted(match: re.Match[str]) -> str:
    return f"\\sqrt{{{match[1] if match[1] is not None else match[2]}}}"


def _fractions(text: str) -> str:
    """`\\frac12`, `\\frac1{2}` and `\\dfrac{1}{2}` as `\\frac{1}{2}`."""
    parts, end = [], 0
    for match in _FRACTION.finditer(text):
        if match.start() < end:
            continue
        parts.append(text[end : match.start()])
        end, arguments = match.end(), []
        for _ in range(2):
            while text[end : end + 1] == " ":
                end += 1
            close = end
            if text[end : end + 1] == "{":
                close = closing(text, end)
                arguments.append(_fractions(text[end + 1 : close].strip()))
            elif (command := _COMMAND.match(text, end)) is not None:
                close = command.end() - 1
                arguments.append(command[0])
            else:
                arguments.append(text[end : end + 1])
            end = close + 1
        parts.append("\\frac{{{}}}{{{}}}".format(*tuple(arguments)))
    return "".join([*parts, text[end:]])


def closing(text: str, start: int) -> int:
    """Where the brace that opens at `start` closes, or the end of the text."""
    depth = 0
    for place in range(start, len(text)):
        if text[place - 1 : place] == "\\" and place > start:
            continue
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return len(text)


def _separators(text: str) -> str:
    """Numbers without thousands separators. A comma in brackets separates entries, unless it is written `{,}`."""
    text = re.sub(r"(?<=[0-9])\s*\{,\}\s*(?=[0-9]{3}(?![0-9]))", "'", text)
    text = re.sub(r"(?<=[0-9])\{,\}(?=[0-9])", ".", text).replace("{,}", ",")

    def joined(match: re.Match[str]) -> str:
        before = text[: match.start()]
        inside = sum(before.count(c) for c in "([{") > sum(before.count(c) for c in ")]}")
        if match[3].startswith(",") and (inside or match[3] != ","):
            return match[0]
        return match[1] + re.sub(r"[^0-9]", "", match[2])

    return _GROUPS.sub(joined, text)
