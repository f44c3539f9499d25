"""Compares our math and DAPO rewards with the graders of the verl package, which has slime's graders, on seeded pairs.

    pip download --no-deps -d wheels verl pylatexenc
    for wheel in wheels/*.whl; do python -m zipfile -e "$wheel" graders; done
    python scripts/compare_graders.py graders

Prints, per kind of answer, the number of pairs with equal results, and each kind of difference once. The script imports
only the two grader files of verl. The package is not a dependency of this project.
"""

from __future__ import annotations

import argparse
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.rm_hub.math_utils import grade_answer_verl

Pair = tuple[str, str, str]
"""(kind, answer of the response, label)."""


def reference(folder: Path) -> tuple[Callable[[str, str], bool], Callable[[str, str], bool]]:
    """Returns verl's graders: (answer, label) -> bool and (response, label) -> bool."""
    sys.path.insert(0, str(folder))
    for name in ("verl", "verl.utils", "verl.utils.reward_score"):  # their __init__ files import all of verl
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")))]
    limits = sys.modules["verl.utils.py_functional"] = types.ModuleType("verl.utils.py_functional")
    limits.timeout_limit = lambda **_: lambda function: function  # type: ignore[attr-defined]
    from verl.utils.reward_score import math_dapo, prime_math

    return prime_math.grade_answer, lambda response, label: bool(
        math_dapo.is_correct_minerva(response, label)[0]
    )


def whole_numbers(rng: random.Random) -> Pair:
    label = rng.choice([rng.randrange(1000), rng.randrange(10**6), -rng.randrange(1, 500)])
    answer = label if rng.random() < 0.6 else label + rng.choice([1, -1, 10])
    form = rng.choice(
        [
            "{}",
            "{:,}",
            "${}$",
            "{}.0",
            "{}.",
            " {} ",
            "+{}",
            "\\${}",
            "{}\\%",
            "{} cm",
            "\\text{{{}}}",
            "{}^\\circ",
            "x={}",
            "0{}",
        ]
    )
    return "whole number " + form.replace("{}", "N").replace("{:,}", "N,NNN"), form.format(answer), str(label)


def fractions(rng: random.Random) -> Pair:
    a, b = rng.randrange(1, 30), rng.randrange(2, 30)
    label = f"\\frac{{{a}}}{{{b}}}"
    factor = rng.choice([1, 1, 2, 3])
    c = a if rng.random() < 0.7 else a + 1
    form = rng.choice(
        ["\\frac{{{}}}{{{}}}", "\\dfrac{{{}}}{{{}}}", "{}/{}", "({})/({})", "\\tfrac{{{}}}{{{}}}"]
    )
    kind = "fraction " + form.replace("{{{}}}", "{a}") + (" times the same" if factor > 1 else "")
    return kind, form.format(c * factor, b * factor), label


def decimals(rng: random.Random) -> Pair:
    label = f"{rng.randrange(100)}.{rng.randrange(1, 1000)}".rstrip("0")
    answer = label if rng.random() < 0.6 else f"{float(label) + 0.01:.3f}"
    form = rng.choice(["{}", "{}0", "${}", "{} meters", "\\approx {}"])
    return "decimal " + form, form.format(answer), label


def expressions(rng: random.Random) -> Pair:
    n, m = rng.randrange(2, 9), rng.randrange(2, 9)
    families = [
        (f"{n}\\sqrt{{{m}}}", [f"{n}\\sqrt{m}", f"{n} \\sqrt{{{m}}}", f"\\sqrt{{{n * n * m}}}", f"{n}*sqrt({m})"]),
        (f"{n}\\pi", [f"{n} \\pi", f"\\pi {n}", f"{n}*\\pi", f"{n}π"]),
        (f"x^2+{n}x+{m}", [f"{m}+{n}x+x^2", f"x^{{2}}+{n}x+{m}", f"x^2 + {n} x + {m}"]),
        (f"({n},{m})", [f"({n}, {m})", f"\\left({n},{m}\\right)", f"[{n},{m}]", f"{n},{m}"]),
        (f"[{n},\\infty)", [f"[{n}, \\infty)", f"\\left[{n},\\infty\\right)", f"[{n},+\\infty)", f"x\\ge {n}"]),
        (f"\\{{{n},{m}\\}}", [f"\\{{{m},{n}\\}}", f"\\{{{n}, {m}\\}}", f"{n},{m}"]),
        (f"2^{{{n}}}", [f"2^{n}", str(2**n), f"2^{{{n}}}"]),
        (f"{n}\\frac{{1}}{{{m}}}", [f"{n * m + 1}/{m}", f"\\frac{{{n * m + 1}}}{{{m}}}", f"{n} \\frac{{1}}{{{m}}}"]),
        (f"y={n}x+{m}", [f"{n}x+{m}", f"y = {n}x + {m}", f"{m}+{n}x"]),
    ]  # fmt: skip
    place = rng.randrange(len(families))
    label, same = families[place]
    answer = rng.choice([label, *same])
    if rng.random() < 0.3:
        answer = answer.replace(str(n), str(n + 1), 1)
    return (
        f"expression: {KINDS[place]}",
        answer,
        label,
    )


def texts(rng: random.Random) -> Pair:
    words = ["Monday", "\\text{even}", "B", "(C)", "yes", "north east", "\\textbf{(A)}"]
    label = rng.choice(words)
    answer = rng.choice([label, label.lower(), label.strip("()"), f"\\text{{{label}}}", rng.choice(words)])
    return "text", answer, label


KINDS = ("root", "pi", "polynomial", "pair", "interval", "set", "power", "mixed number", "equation")
MAKERS = (whole_numbers, fractions, decimals, expressions, expressions, texts)


def pairs(count: int, seed: int = 0) -> Iterator[Pair]:
    """Yields `count` pairs of an answer and a label. The same seed gives the same pairs."""
    rng = random.Random(seed)
    for _ in range(count):
        yield rng.choice(MAKERS)(rng)


def report(name: str, verdicts: list[tuple[Pair, bool, bool]]) -> None:
    """Prints a reward's table (kind, pairs, equal results), and then one example per kind and direction."""
    total, same = Counter(p[0] for p, _, _ in verdicts), Counter(p[0] for p, a, b in verdicts if a == b)
    print(f"{name}: {sum(same.values())} of {len(verdicts)} pairs have the same verdict")
    for kind in sorted(k for k in total if same[k] < total[k]):
        for ours in (True, False):
            found = [(p, b) for p, a, b in verdicts if p[0] == kind and a is ours and b is not ours]
            if found:
                (_, answer, label), _ = found[0]
                who = "ours only" if ours else "verl only"
                print(
                    f"  {kind}: {len(found)} of {total[kind]} right by {who}, such as {answer!r} for {label!r}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the wheels of verl and pylatexenc are unpacked")
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    math, dapo = reference(args.folder)
    made = list(pairs(args.count, args.seed))
    report("math", [(p, grade_answer_verl(f"So \\boxed{{{p[1]}}}", p[2]), math(p[1], p[2])) for p in made])
    lines = [(p, f"It is so.\nAnswer: {p[1]}") for p in made]
    report("dapo", [(p, compute_score(text, p[2])["acc"], dapo(text, p[2])) for p, text in lines])


if __name__ == "__main__":
    main()
