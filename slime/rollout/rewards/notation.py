"""This module normalizes mathematical text: Unicode, math mode, spaces, fractions, text commands and digits.

It never removes a part that carries a value: a unit, a base or a constant stays in the text.
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
_MATH_MODE = re.compile(r"\$\$|\$|\\\(|\\\[")
_MATH_MODE_ENDS = {"$$": "$$", "$": "$", "\\(": "\\)", "\\[": "\\]"}
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
_GROUP = re.compile(r"\{([^{}]*)\}")
_OVER = re.compile(r"\\over(?![A-Za-z])\s*")
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
_BRACE = re.compile(r"[{}]")
_BARE_NAME = re.compile(
    r"(?<![\\A-Za-z])(pi|infinity|oo|" + "|".join(sorted(FUNCTIONS - {"inf"})) + r")(?![A-Za-z])"
)
_POWER = re.compile(r"\^\s*(?:\(([^()]*)\)|([-+]?[0-9]+(?:\.[0-9]+)?(?:/[0-9]+)?))")
_ROOT = re.compile(r"\\sqrt\s*(?:\(((?:[^()]|\([^()]*\))*)\)|([0-9]+(?:\.[0-9]+)?|[A-Za-z]))")
_GROUPS = re.compile(
    r"(?<![0-9.,])(?<![0-9][ '_])([0-9]{1,3})(([ '_]|, ?)[0-9]{3}(?:\3[0-9]{3})*)(?![0-9])(?!,[0-9])"
)


def tidy(text: str) -> str:
    """Returns the normal form of `text`: ASCII digits and signs, no math mode, single spaces, `\\frac{a}{b}`,
    `\\text{words}`, `\\degree`, `^{n}`, numbers without separators, `\\dollar` for a currency's `$`."""
    text = _characters(text.strip())
    text = text.replace("\\$", "\\dollar ").replace("\\\\%", "\\%")
    text = _without_math_mode(text)
    text = text.replace("$", "\\dollar ").replace("{,}\\!", "{,}").replace(",\\!", "{,}").replace("{:}", ":")
    text = _SPACE.sub(" ", _SIZES.sub(" " if "\\right" in text and "\\begin" in text else "", text)).strip()
    text = re.sub(r"\\log\s*_\s*(?:e(?![A-Za-z])|\{\s*e\s*\})", r"\\ln ", _COMMAND.sub(_renamed, text))
    text = re.sub(r"(?<!\\)%", r"\\%", _DEGREE.sub(r"\\degree ", text))
    text = _texts(_FONT.sub(r"\\mathrm{\1}", text))
    text = re.sub(r"\*\*|(?<!\\)\*", lambda m: "^" if m[0] == "**" else "\\cdot ", text)
    text = _BARE_NAME.sub(
        lambda m: {"oo": "\\infty "}.get(m[1], "\\infty " if m[1] == "infinity" else f"\\{m[1]} "), text
    )
    text = _GROUP.sub(_over, text) if "\\over" in text else text
    text = _fractions(_POWER.sub(_braced, _ROOT.sub(_rooted, text)))
    text = _separators(re.sub(r"(?<!\d)_\s*([0-9]+)", r"_{\1}", text))
    text = re.sub(r"(?<![0-9A-Za-z})\]])\+\s*(?=\\infty)", "", " ".join(text.split()))
    return text.strip().rstrip(",;").rstrip(".").rstrip()


def _without_math_mode(text: str) -> str:
    """Replaces each pair of `$`, `$$`, `\\(` and `\\)`, or `\\[` and `\\]` by spaces."""
    parts, kept, position = [], 0, 0
    absent: set[str] = set()  # marks without a further closing mark
    while (opening := _MATH_MODE.search(text, position)) is not None:
        position = opening.start() + 1
        for mark in ("$$", "$") if opening[0] == "$$" else (opening[0],):
            start = opening.start() + len(mark)
            end = -1 if mark in absent else text.find(_MATH_MODE_ENDS[mark], start)
            if end >= 0:
                parts += [text[kept : opening.start()], " ", text[start:end], " "]
                kept = position = end + len(mark)
                break
            absent.add(mark)
    return "".join([*parts, text[kept:]])


def _over(group: re.Match[str]) -> str:
    """Rewrites `{a\\over b}` as a fraction; other groups do not change."""
    last = [None, *_OVER.finditer(group[1])][-1]
    return group[0] if last is None else f"\\frac{{{group[1][: last.start()]}}}{{{group[1][last.end() :]}}}"


def _characters(text: str) -> str:
    """Rewrites Unicode's mathematical characters as LaTeX, with ASCII digits."""
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
    """Rewrites words and units in any font as `\\text{...}`. A single letter loses its font; sin becomes `\\sin`."""
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
    """Rewrites `\\frac12`, `\\frac1{2}` and `\\dfrac{1}{2}` as `\\frac{1}{2}`."""
    closes, parts, position = _closings(text), [], 0
    inside: list[tuple[int, int, int]] = []  # per open argument: end, closing brace, following arguments
    while True:
        end, brace, left = inside[-1] if inside else (len(text), len(text), 0)
        match = _FRACTION.search(text, position, end)
        if match is not None:
            parts += [text[position : match.start()], "\\frac"]
            position, left = match.end(), 2
        else:
            parts.append(text[position:end])
            if not inside:
                return "".join(parts)
            inside.pop()
            parts.append("}")
            position, end = brace + 1, inside[-1][0] if inside else len(text)
        while left:
            left -= 1
            position = _after_spaces(text, position, end)
            parts.append("{")
            if text.startswith("{", position, end):
                close = min(closes[position], end)
                position = _after_spaces(text, position + 1, close)
                inside.append((_before_spaces(text, position, close), close, left))
                break
            command = _COMMAND.match(text, position, end)
            parts += [command[0] if command else text[position : min(position + 1, end)], "}"]
            position = command.end() if command else position + 1


def _after_spaces(text: str, position: int, end: int) -> int:
    while position < end and text[position] == " ":
        position += 1
    return position


def _before_spaces(text: str, start: int, end: int) -> int:
    while end > start and text[end - 1] == " ":
        end -= 1
    return end


def _closings(text: str) -> dict[int, int]:
    """Maps the position of each opening brace to that of its closing brace, or to the end of the text. An escaped brace
    closes with its group."""
    closes: dict[int, int] = {}
    escaped = {
        match.start() for match in _BRACE.finditer(text) if text[match.start() - 1 : match.start()] == "\\"
    }
    opened: list[int] = []
    for match in _BRACE.finditer(text):
        position = match.start()
        if match[0] == "{":
            opened.append(position)
        elif position not in escaped:
            while opened and opened[-1] in escaped:
                closes[opened.pop()] = position
            if opened:
                closes[opened.pop()] = position
    return closes | dict.fromkeys(opened, len(text))


def _separators(text: str) -> str:
    """Removes thousands separators. A comma in brackets separates entries, unless it is written `{,}`."""
    text = re.sub(r"(?<=[0-9])\s*\{,\}\s*(?=[0-9]{3}(?![0-9]))", "'", text)
    text = re.sub(r"(?<=[0-9])\{,\}(?=[0-9])", ".", text).replace("{,}", ",")

    depth = counted = 0

    def joined(match: re.Match[str]) -> str:
        nonlocal depth, counted
        passed, counted = text[counted : match.start()], match.start()
        depth += sum(passed.count(c) for c in "([{") - sum(passed.count(c) for c in ")]}")
        if match[3].startswith(",") and (depth > 0 or match[3] != ","):
            return match[0]
        return match[1] + re.sub(r"[^0-9]", "", match[2])

    return _GROUPS.sub(joined, text)
