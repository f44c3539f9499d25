"""Tests right answers in their many notations, answers of dapo, and the ends of responses."""

from __future__ import annotations

import pytest

from slime.rollout.rewards import REWARDS
from slime.rollout.rewards.math_equal import same_answer

# label | answer
SAME = r"""
30 | 30°
30^\circ | 30
30 | 30 degrees
12345 | 12\,345
12345 | 12\ 345
12345 | 12~345
12345 | 12{,}345
12345 | 12,\!345
12345 | 12'345
12345 | 12_345
12345 | 12 345
1234567 | 1,234,567
1234567 | 1\;234\;567
12345.6 | 12,345.6
12345 | １２３４５
-5 | −5
-5 | –5
12 | ١٢
\frac12 | ½
2\frac12 | 2½
2\frac{1}{2} | 2 1/2
2\frac{1}{2} | \frac{5}{2}
2\frac{1}{2} | 2.5
-2\frac12 | -2.5
\frac{3}{4} | 3/4
\frac{3}{4} | {3 \over 4}
\frac{3}{4} | \tfrac34
\frac{3}{4} | 0.75
\frac{3}{4} | .75
\frac{3}{4} | 3⁄4
\frac{3}{4} | \frac 3 4
\frac{3}{4} | (3)/(4)
-\frac{3}{4} | \frac{-3}{4}
-\frac{3}{4} | \frac{3}{-4}
\frac{1}{3} | 0.\overline{3}
\frac{1}{3} | 0.333333
1.6\times10^{-19} | 1.6e-19
1.6\times10^{-19} | 1.6 \cdot 10^{-19}
1.6\times10^{-19} | 1.6 × 10⁻¹⁹
1.6\times10^{-19} | 1.6*10^-19
1.6\times 10^{-19}\text{ C} | 1.6\times10^{-19}
52_8 | 52_{8}
52_8 | 52_{\text{eight}}
52_8 | (52)_8
52_8 | 52 base 8
101_2 | 101_{2}
1A_{16} | 1a_{16}
2+3i | 2+3\mathrm{i}
2+3i | 3i+2
6+9i | 6+9 i
6+9i | 6 + 9\text{i}
e^2 | \mathrm{e}^2
e^2 | {\rm e}^2
12\pi | 12π
12\pi | 12\,\pi
864 | 864 \mbox{ inches}^2
864 \mbox{ inches}^2 | 864
18 | 18 dollars
18 | \$18
18 | 18 \text{ dollars}
18 | 18\text{ eggs}
18.50 | \$18.50
50 | 50\%
\frac12 | 50\%
50\% | 50
50 | 50 percent
5000000 | 5\text{ million}
5 million | 5\text{ million}
Evelyn | evelyn
Evelyn | \text{EVELYN}
Evelyn | \textbf{Evelyn}
\text{north-east} | north east
(1,2) | (1, 2)
(1,2) | \left(1,2\right)
[2,\infty) | [2,+\infty)
[2,\infty) | [2, ∞)
(-\infty,2)\cup(3,\infty) | (-∞, 2) ∪ (3, ∞)
(-\infty,2)\cup(3,\infty) | (3,\infty)\cup(-\infty,2)
\{1,2\} | \{2,1\}
\{1,2\} | 2, 1
1,2 | 2 \text{ and } 1
1,2 | x=1, x=2
1,2 | 1 and 2
3,-3 | \pm 3
1+\sqrt2, 1-\sqrt2 | 1\pm\sqrt{2}
1\pm\sqrt{2} | 1 \pm \sqrt2
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix} 1 \\ \frac{4}{2} \end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{bmatrix}1&2\\3&4\end{bmatrix}
\sqrt{8} | 2\sqrt{2}
2\sqrt{10} | 2√10
x^2+2x+1 | (x+1)^2
5 | x=5
x=5 | 5
y=2x+7 | 7+2x
x \ge 5 | 5 \le x
1<x<2 | 1 < x < 2
x \in [2,3] | [2,3]
\pi R^2 | \pi R^{2}
3.14 | 3.140
A | \text{(A)}
A | (A)
B | b
\text{(C)} | C
\frac{\pi}{2} | \pi/2
\sqrt[3]{5} | 5^{1/3}
\log_2 3 | \frac{\ln 3}{\ln 2}
\binom{5}{2} | \binom{5}{3}
\frac{1}{2^{80}} | 2^{-80}
2^{10} | 2^10
10^{-19} | 10^-19
50\text{ cm} | 50 cm
50\text{ cm} | 50\,\mathrm{cm}
50\text{ cm} | 50 centimeters
5 \text{ cm}^2 | 5 cm²
5 \text{ square units} | 5
10\text{ m/s} | 10 m/s
10\text{ m/s} | 10 \text{ meters per second}
9.8\,\text{m/s}^2 | 9.8
\emptyset | \varnothing
\infty | ∞
\tan^{-1}(2) | \arctan 2
\frac{x+1}{2} | \frac{1}{2}x+\frac12
(3,4) | (3.0, 4)
12:30 | 12:30
3:4 | 3 : 4
2\cdot 3^4 | 3^4 \cdot 2
\sin 30° | \sin(30^\circ)
2xy | 2yx
\frac{\sqrt{3}}{3} | \frac{1}{\sqrt3}
\text{Yes} | yes
\text{no solution} | No solution.
x^2 | x²
a_1 + a_2 | a_2+a_1
-1 | -1.0
5 | +5
5 | 05
5 | 5.
5 | {5}
5 | (5)
\frac{1}{2} | \dfrac{1}{2}\text{ hours}
\frac{2}{3}\text{ cups} | \frac23
2\pi\text{ cm} | 2\pi
1,000 | 1000
\$1,000.50 | 1000.5
0.5 | \frac{1}{2}
\langle 1,2\rangle | \langle 1, 2 \rangle
i | \mathrm{i}
3,5,7 | 3, 5, 7
P(x)=x^2+1 | x^2+1
f(x) = x+1 | f(x)=1+x
\text{June 20} | June 20
\text{3:15 p.m.} | 3:15 p.m.
2^{\frac{1}{2}} | \sqrt{2}
0.0016 | 1.6\times10^{-3}
x=1\text{ or }x=2 | x=2 or x=1
x=10 | 10
\frac{5}{3} | 1\frac{2}{3}
-\frac{5}{3} | -1\frac{2}{3}
100^\circ\text{C} | 100°C
100^\circ\text{C} | 100
25\% | \frac{1}{4}
25\% | 0.25
0.25 | 25%
7:30 | 7{:}30
\text{7:30 PM} | 7:30 pm
1\,000\,000 | 1000000
1\,000\,000 | 1 million
3.5\text{ million} | 3500000
12\text{ in} | 1\text{ ft}
60\text{ minutes} | 1 hour
60 | 60 minutes
\$5 | 5 dollars
\$0.50 | 50 cents
€5 | 5 €
€5 | 5
2.0 | 2
\{1, 2, 3\} | \{3,2,1\}
\{1,2,3\} | {1,2,3}
(0,1)\cup(1,2) | (1,2)\cup(0,1)
[0,1] \cup \{2\} | \{2\}\cup[0,1]
\left(\frac12, \infty\right) | (0.5, ∞)
(-\infty, 3] | (-\infty,3]
x < 3 | 3 > x
x\neq 2 | x \ne 2
y = \frac{1}{2}x + 3 | y=0.5x+3
y = 2x+1 | 2x + 1 = y
x^2 + y^2 = 4 | y^2+x^2=4
2x-y=3 | y = 2x-3
\begin{bmatrix} 1 & 0 \\ 0 & 1 \end{bmatrix} | \begin{pmatrix}1&0\\0&1\end{pmatrix}
\left[\begin{array}{cc}1&0\\0&1\end{array}\right] | \begin{pmatrix}1&0\\0&1\end{pmatrix}
\frac{\sqrt{2}}{2} | \frac{1}{\sqrt{2}}
\frac{\sqrt{2}}{2} | 0.707107
\sqrt{2} | 2^{1/2}
\sqrt{2} | 2^{0.5}
e^{i\pi/4} | \exp(i\pi/4)
1-i | 1 - \mathrm{i}
\frac{1+i}{2} | \frac{1}{2}+\frac{i}{2}
\frac{1}{1+i} | \frac{1-i}{2}
6! | 6!
n(n+1)/2 | \frac{n(n+1)}{2}
\frac{n^2+n}{2} | \frac{n(n+1)}{2}
\ln 2 | \log_e 2
\log_{10} 5 | \log 5
|x| | \left|x\right|
\lfloor x \rfloor | \lfloor x\rfloor
\cos\theta | \cos(\theta)
\sin^2 x | (\sin x)^2
\tan x | \frac{\sin x}{\cos x}
\overrightarrow{AB} | \overrightarrow{AB}
\angle ABC | \angle ABC
3\vec{i}+4\vec{j} | 3\vec{i} + 4\vec{j}
\text{Friday} | friday
\text{(B)} | B
\text{B} | \textbf{(B)}
A, C | A and C
A,C | A, C
\text{two} | two
\text{Not enough information} | not enough information
0.\overline{142857} | \frac{1}{7}
0.1\overline{6} | \frac16
10101_2 | 10101_{2}
2,4,8 | 2, 4, 8
k=3 | 3
\frac{a}{b} | a/b
\frac{2a+b}{3} | \frac{2}{3}a+\frac{1}{3}b
4\sqrt{3}\text{ cm}^2 | 4\sqrt3
4\sqrt{3} | 4\sqrt{3}\text{ square units}
120^\circ | 120 \text{ degrees}
120^\circ | 120
120 | 120\degree
\frac{\pi}{3}\text{ radians} | \frac{\pi}{3}
5\frac{1}{2} | 11/2
5\frac{1}{2}\text{ cups} | 5.5
-0.5 | -\frac12
-0.5 | -1/2
+3 | 3
 7  | 7
7 | \mathbf{7}
7 | \boxed{7}
7 | \color{red}{7}
7 | \textcolor{blue}{7}
7 | 7\,
x+1 | 1 + x
\left(x+1\right)^2 | (x+1)(x+1)
3x^2y | 3yx^2
P = 2(l+w) | P=2l+2w
\varnothing | \{\}
\mathbb{R} | ℝ
\infty | \text{infinity}
-\infty | -∞
\text{undefined} | undefined
f(x)=2x | 2x
(3, -2) | (3,−2)
(3, \frac{\pi}{2}) | \left(3,\frac{\pi}2\right)
\pm\sqrt{3} | \sqrt{3}, -\sqrt{3}
x = 2 \text{ or } x = -3 | -3, 2
2 \text{ and } 3 | 2,3
1{,}234 | 1234
1.5\times 10^{3} | 1.5e3
\frac{3}{8} | 0.375
\frac{22}{7} | 3\frac{1}{7}
a^{n+1} | a^{1+n}
2^{n} \cdot 2 | 2^{n+1}
\frac{x^2-1}{x-1} | x+1
"""

# fmt: off
ENDS = [
    "</s>", "<eos>", "<end_of_turn>", "<|im_end|>", "<｜end▁of▁sentence｜>", "[e~[", "<|eot_id|>",
    "<|endoftext|>", "[EOS]", "<|end|>", "<pad><pad>", "<|im_end|>\n", "[|endofturn|]", "<turn|>",
    "<end_of_utterance>", "<｜hy_eos｜>", "[SEP][PAD]", "<|END_OF_TURN_TOKEN|>", "<EOT>", "<seed:eos>",
    " </s></s>",
]
DAPO = [
    ("34", r"Answer: \(34\)", 1), ("34", "Answer: $34$", 1), ("34", "**Answer:** **34**", 1),
    ("34", "Answer: 34.", 1), ("34", "Answer: 34 or 35", -1), ("5", "Answer: 5 million", -1),
    (r"\text{HHT}", "Answer: THH", -1), ("3", "Answer: 3i", -1), ("34", "Answer: 34 apples", 1),
    ("0.5", "Answer: 1/2", 1), ("7", "Answer: 3 4", -1), ("(1,2)", "Answer: (2,1)", -1),
    ("34", "Answer: x = 34", 1), ("Evelyn", "Answer: evelyn.", 1), ("1000", "Answer: 1,000", 1),
    ("-3", "Answer: −3", 1),
]
# fmt: on


def pairs(table: str) -> list[tuple[str, str]]:
    return [(label, answer) for label, answer in (line.split(" | ") for line in table.strip().splitlines())]


@pytest.mark.parametrize(("label", "answer"), pairs(SAME))
def test_same(label, answer):
    assert same_answer(answer, label) is True


@pytest.mark.parametrize(("label", "line", "score"), DAPO)
def test_dapo(label, line, score):
    assert REWARDS["dapo"](f"So it is.\n{line}", label, {})["score"] == score


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("math", "\\boxed 5"),
        ("deepscaler", "</think>\\boxed 5"),
        ("dapo", "Answer: 5"),
        ("gsm8k", "it is 5"),
        ("f1", "5"),
    ],
)
def test_a_special_token_at_the_end_is_no_part_of_the_answer(name, answer, end):
    """The cases are usual spellings of special tokens, without a tokenizer. test_rewards_special_tokens has other
    spellings."""
    reward = REWARDS[name](answer + end, "5", {})
    assert (reward["score"] if isinstance(reward, dict) else reward) == 1.0
