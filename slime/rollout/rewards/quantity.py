"""This module reads a number with its unit as an exact value. It owns notations, magnitudes, bases and units.

Only a single number is a quantity. A ratio, a time, a power or two adjacent numbers are not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Literal

from slime.rollout.rewards.notation import FUNCTIONS

Form = Literal["whole", "decimal", "fraction", "mixed", "power"]

LONGEST = 2000
"""Maximum length in characters of an answer that is read as mathematics. A longer answer equals only the same text."""
_LONGEST_EXPONENT = 1000
"""Largest exponent of 10 in a quantity. The digits of a larger power would fill the memory."""
_POWER_OF_UNIT = re.compile(r"-?[0-9]{1,2}")
"""A unit's exponent has at most two digits, because cm^1000000000 would fill the memory."""
TOLERANCE = Fraction(1, 10**6) * Fraction(1000001, 1000000)
"""Relative tolerance for a decimal that is rounded from a value with more digits, such as 0.333333 for 1/3."""

_MAGNITUDES = {
    **{
        "dozen": 12,
        "hundred": 100,
        "thousand": 10**3,
        "million": 10**6,
        "billion": 10**9,
        "trillion": 10**12,
    },
    **{
        "k": 10**3,
        "mn": 10**6,
        "mio": 10**6,
        "bn": 10**9,
        "quadrillion": 10**15,
        "lakh": 10**5,
        "crore": 10**7,
    },
}
_CURRENCIES = {
    **dict.fromkeys(("\\dollar", "US\\dollar", "USD"), "dollar"),
    **dict.fromkeys(("€", "EUR", "\\euro"), "euro"),
    **{"£": "pound", "GBP": "pound", "¥": "yen", "₹": "rupee"},
}


def _units() -> dict[str, tuple[str, Fraction]]:
    """Maps a unit to (dimension, size in the dimension's base unit)."""
    table = {
        "length": "m meter metre 1; cm centimeter centimetre 1/100; mm millimeter millimetre 1/1000; km kilometer "
        "kilometre 1000; in inch 0.0254; ft foot 0.3048; yd yard 0.9144; mi mile 1609.344; nm nanometer nanometre "
        "1/1000000000; µm μm micrometer micrometre micron 1/1000000; dm decimeter decimetre 1/10",
        "time": "s sec second 1; min minute 60; h hr hour 3600; day 86400; week 604800; ms millisecond 1/1000",
        "months": "month 1; year yr 12",
        "mass": "kg kilogram 1000; g gram 1; mg milligram 1/1000; lb pound 453.59237; oz ounce 28.349523125; "
        "ton tonne 1000000",
        "volume": "L l liter litre 1; mL ml milliliter millilitre 1/1000; gal gallon 3.785411784",
        "angle": "degree deg 1",
        "radian": "rad radian 1",
        "dollar": "dollar buck usd $ 1; cent ¢ 1/100",
        "euro": "euro eur € 1",
        "pound": "£ gbp 1",
        "yen": "¥ yen 1",
        "temperature": "celsius 1",
        "fahrenheit": "fahrenheit 1",
        "kelvin": "K kelvin 1",
        "energy": "J joule 1; kJ kilojoule 1000; cal calorie 4.184; eV 1.602176634e-19",
        "force": "N newton 1; kN kilonewton 1000",
        "power": "W watt 1; kW kilowatt 1000",
        "voltage": "V volt 1; mV millivolt 1/1000; kV kilovolt 1000",
        "current": "A amp ampere 1; mA milliamp milliampere 1/1000",
        "pressure": "Pa pascal 1; kPa kilopascal 1000; atm atmosphere 101325",
        "frequency": "Hz hertz 1; kHz kilohertz 1000; MHz megahertz 1000000",
        "morning": "am 1",
        "afternoon": "pm 1",
        "amount": "mol mole 1; mmol millimole 1/1000",
    }
    units = {}
    for kind, text in table.items():
        for entry in text.split(";"):
            *names, size = entry.split()
            units.update({name: (kind, Fraction(size)) for name in names})
    return units


UNITS = _units()
_PLURALS = {"inches": "inch", "feet": "foot", "centuries": "century", "hertz": "hertz"}
_NO_UNIT = (
    FUNCTIONS
    | {
        "or",
        "and",
        "to",
        "than",
        "not",
        "no",
        "least",
        "most",
        "more",
        "less",
        "about",
        "between",
        "from",
        "of",
        "minus",
        "plus",
        "times",
        "over",
        "divided",
        "by",
        "negative",
        "choose",
        "squared",
        "cubed",
        "factorial",
        "half",
        "halves",
        "third",
        "thirds",
        "fourth",
        "fourths",
        "quarter",
        "quarters",
        "fifth",
        "fifths",
        "sixth",
        "sixths",
        "tenth",
        "tenths",
        "hundredth",
        "hundredths",
        "thousandth",
        "thousandths",
        "percent",
        "base",
        "pi",
        "infinity",
        "mod",
        "modulo",
        "is",
        "are",
        "e",
        "i",
        "x",
        "y",
        "z",
        "n",
    }
    | set(_MAGNITUDES) - {"k"}
)
_ALLOWED = {"per", "square", "cubic", "sq", "cu", "of", "a", "an", "each", "the", "in"}

_DIGITS = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*\{?([0-9]+)\}?")
_POWER = re.compile(
    rf"({_DIGITS})\s*\\(?:times|cdot)\s*10\s*\^\s*\{{?\s*([-+]?[0-9]+)\s*\}}?|10\s*\^\s*\{{\s*([-+]?[0-9]+)\s*\}}"
)
_LITERAL = re.compile(rf"({_DIGITS})(?:[eE]([-+]?[0-9]+))?")
_FRACTION = re.compile(r"\\frac\{\s*([-+]?[0-9]+)\s*\}\{\s*([-+]?[0-9]+)\s*\}|([0-9]+)\s*/\s*([0-9]+)")
_MIXED = re.compile(r"([0-9]+)\s*(?:\\frac\{([0-9]+)\}\{([0-9]+)\}|\s([0-9]+)\s*/\s*([0-9]+))")
_BASE = re.compile(
    r"\(?((?:\\text\{)?[0-9A-Fa-f]+\}?)\)?\s*_\s*\{?\s*\(?(?:\\text\{)?\s*(?:base\s+)?([0-9]+|[a-z]+)\}?\)?\s*\}?"
)
_BASE_WORDS = re.compile(
    r"([0-9A-Fa-f]+)\s*\(?(?:\\text\{)?\s*\(?\s*(?:in )?base[- ]\}?\s*([0-9]+|[a-z]+)\s*\)?\}?\)?"
)
_BASE_NAMES = {
    name: number
    for number, name in enumerate(
        ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"], start=2
    )
} | {"sixteen": 16}
_NUMBER = re.compile("|".join(f"(?:{p.pattern})" for p in (_REPEATING, _MIXED, _POWER, _FRACTION, _LITERAL)))
_UNIT_WORD = re.compile(r"[A-Za-zµμ]+\.?|[$¢€£¥]")


@dataclass(frozen=True)
class Quantity:
    """An exact value, its written form, and its unit: dimensions with powers, or the words of an unknown unit."""

    value: Fraction
    form: Form
    parts: tuple[int, int] = (0, 1)
    percent: bool = False
    base: int = 10
    unit: tuple[str, ...] = ()
    size: Fraction = Fraction(1)
    known: bool = True


def quantity(text: str) -> Quantity | None:
    """Parses a text in the normal form of `notation.tidy` as a quantity, or returns None."""
    text = text.strip()
    if len(text) > LONGEST:
        return None
    for pattern in (_BASE, _BASE_WORDS):
        if (match := pattern.fullmatch(text)) is not None:
            return _parse_digits(match[1], match[2])
    sign = 1
    currency = ""
    while text[:1] in "+-" or any(text.startswith(name) for name in _CURRENCIES):
        name = next((name for name in _CURRENCIES if text.startswith(name)), "")
        if not text or (name and currency):
            return None
        currency = currency or name
        sign = -sign if text[0] == "-" else sign
        text = text[len(name) or 1 :].lstrip()
    text = text[1:-1].strip() if re.fullmatch(r"\{[^{}]*\}|\([^(),]*\)", text) else text
    match = _NUMBER.match(text)
    if match is None or re.match(r"[.0-9]|\s*[/^_:!]", rest := text[match.end() :]):
        return None
    number = _number(match[0])
    if number is None:
        return None
    value, form, parts = number
    return _with_unit(sign * value, form, (sign * parts[0], parts[1]), rest.rstrip(), currency)


def _parse_digits(digits: str, base: str) -> Quantity | None:
    number = int(base) if base.isdigit() else _BASE_NAMES.get(base, 0)
    digits = digits.removeprefix("\\text{").removesuffix("}")
    if number < 2 or not (number == 16 or re.search("[0-9]", digits)):  # a_12 is a symbol
        return None
    try:
        return Quantity(Fraction(int(digits, number)), "whole", base=number)
    except ValueError:  # a digit is not valid in the base
        return None


def _number(text: str) -> tuple[Fraction, Form, tuple[int, int]] | None:
    """Returns the value, the form, and the numerator and denominator as written."""
    if match := _REPEATING.fullmatch(text):
        whole, start, again = match[1] or "0", match[2], match[3]
        shift = 10 ** len(start)
        value = Fraction(int(whole + start), shift) + Fraction(int(again), shift * (10 ** len(again) - 1))
        return value, "decimal", (0, 0)
    if match := _MIXED.fullmatch(text):
        whole, top, bottom = match[1], match[2] or match[4], match[3] or match[5]
        if not 0 < int(top) < int(bottom):
            return None
        return int(whole) + Fraction(int(top), int(bottom)), "mixed", (int(top), int(bottom))
    if match := _POWER.fullmatch(text):
        return _scaled(match[1] or "1", match[2] or match[3], "power")
    if match := _FRACTION.fullmatch(text):
        top, bottom = (int(part) for part in match.groups() if part is not None)
        if bottom == 0:
            return None
        sign = -1 if (top < 0) != (bottom < 0) else 1
        return Fraction(top, bottom), "fraction", (sign * abs(top), abs(bottom))
    match = _LITERAL.fullmatch(text)
    return None if match is None else _scaled(match[1], match[2] or "0", "power" if match[2] else None)


def _scaled(digits: str, exponent: str, form: Form | None) -> tuple[Fraction, Form, tuple[int, int]] | None:
    if len(exponent) > 6 or abs(int(exponent)) > _LONGEST_EXPONENT:
        return None
    try:
        value = Fraction(Decimal(digits)) * Fraction(10) ** int(exponent)
    except InvalidOperation:
        return None
    return value, form or ("whole" if value.denominator == 1 else "decimal"), (0, 0)


def _with_unit(
    value: Fraction, form: Form, parts: tuple[int, int], rest: str, currency: str
) -> Quantity | None:
    words = re.match(r"\s*(?:\\text\{\s*)?-?([A-Za-z]+)\}?(?=\s|$|\\)", rest)
    if words is not None and (scale := _MAGNITUDES.get(words[1].lower().removesuffix("s"))):
        if words[1] in "kK" and rest[:1] == " ":
            return None
        value, form = value * scale, "whole" if (value * scale).denominator == 1 else "decimal"
        inner = rest[words.end() :]
        rest = f"\\text{{{inner}" if "\\" in words[0] and not words[0].endswith("}") else f" {inner.strip()}"
    rest = re.sub(r"\\text\{\s*\}", "", rest).rstrip()
    if re.fullmatch(r"\s*(?:\\%|(?:\\text\{)?\s*(?:percent|per cent|pct)\.?\s*\}?)", rest):
        return Quantity(value, form, parts, percent=True)
    if not rest.strip():
        return Quantity(value, form, parts, unit=(f"{_CURRENCIES[currency]}^1",) if currency else ())
    found = parse_unit(rest)
    if found is None:
        return None
    kind, size, known = found
    return Quantity(value, form, parts, unit=kind, size=size, known=known)


def parse_unit(text: str) -> tuple[tuple[str, ...], Fraction, bool] | None:
    """Returns (dimensions with powers, size, True if every unit is known) for a text that is only a unit, or None.

    A single letter is a unit only in `\\text{}`, because "5m" is 5 times m.
    """
    if text.strip() in ("\\degree", "\\degree C", "\\degree F", "\\degree \\text{C}", "\\degree \\text{F}"):
        name = {"C": "temperature", "F": "fahrenheit"}.get(text.strip().rstrip("}")[-1], "angle")
        return (f"{name}^1",), Fraction(1), True
    in_text = "\\text{" in text or "/" in text
    separated = in_text or text != text.lstrip()
    text = text.strip()
    plain = (
        re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
        .replace("\\cdot", " ")
        .replace("\\degree", "degree")
        .replace("\\dollar", "$")
    )
    plain = re.sub(r"\s*\^\s*\{?\s*(-?[0-9]+)\s*\}?", r"^\1 ", plain)
    plain = re.sub(r"[()\-,]", " ", plain.replace("^-", "^~")).replace("^~", "^-")
    powers: dict[str, int] = {}
    size, known, side, twice, unknown = Fraction(1), True, 1, 1, []
    for token in re.findall(r"/|[^\s/]+", plain):
        word, _, power = token.partition("^")
        name = word.removesuffix(".")
        if token == "/" or name == "per":
            side = -1
        elif name in ("square", "sq", "cubic", "cu"):
            twice = 3 if name.startswith("cu") else 2
        elif (
            not _UNIT_WORD.fullmatch(word)
            or (len(name) < 2 and not in_text and name.isalpha())
            or (power and not _POWER_OF_UNIT.fullmatch(power))
        ):
            return None
        elif (entry := _entry(name)) is not None:
            step = side * (int(power) if power else 1) * twice
            powers[entry[0]] = powers.get(entry[0], 0) + step
            size, twice = size * entry[1] ** step, 1
        elif (
            not separated
            or (len(name) < 3 and not in_text and name.lower() not in _ALLOWED)
            or (
                (name.lower() in _NO_UNIT and name.lower() not in _ALLOWED)
                or (power and name.lower() not in ("unit", "units"))
            )
        ):
            return None
        else:
            known, twice = False, 1
            unknown += [] if name.lower() in _ALLOWED else [name.lower().removesuffix("s")]
    if not powers and not unknown:
        return None
    kinds = tuple(f"{name}^{power}" for name, power in sorted(powers.items()))
    return (kinds if known else tuple(unknown)), size, known


def _entry(name: str) -> tuple[str, Fraction] | None:
    for form in (name, name.lower(), _PLURALS.get(name.lower(), ""), name.lower().removesuffix("s")):
        if form in UNITS and (len(form) > 1 or form == name):
            return UNITS[form]
    return None


def decimal_text(value: Fraction) -> str | None:
    """Returns the shortest decimal text of a value, such as "-0.5", or None for an infinite or very long decimal."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > 4000:
        return None
    decimals = next((n for n in range(1200) if (value * 10**n).denominator == 1), None)
    if decimals is None:
        return None
    digits = str(abs(int(value * 10**decimals))).rjust(decimals + 1, "0")
    text = f"{digits[:-decimals]}.{digits[-decimals:]}" if decimals else digits
    return "-" + text if value < 0 else text
