"""Tests wrong answers that look like the label: each pair differs in one letter, sign, unit, base, digit or
position."""

from __future__ import annotations

import pytest

from slime.rollout.rewards.math_equal import same_answer

# label | answer
WRONG = r"""
HHT | THH
BCA | ACB
IX | XI
east | seat
\text{HHT} | THH
\pi R^2 | \pi r^2
0.0000003 | 0.0000004
1.6\times10^{-19} | 9.1\times10^{-31}
\frac{1}{2^{80}} | \frac{1}{2^{81}}
\frac{13!}{52!} | \frac{1}{52!}
52_8 | 52_7
52_8 | 52
52 | 52_8
357 | 12\,345
7 | 3 4
8 | 3\quad 5
3 | 3\mathrm{i}
2\mathrm{e} | 2
5 | 5\text{ million}
5 | 5 thousand
5 | 5k
12 | 3(4)4
7 | 3~4
7 | 3\ 4
7 | 3\;4
5 | 5\pi
5 | 5\text{ dozen}
5\text{ km} | 5\text{ m}
5\text{ cm} | 5\text{ inches}
5\text{ hours} | 5\text{ minutes}
5\text{ cm}^2 | 5\text{ cm}^3
\pi\cdot10^{-20} | 2\pi\cdot10^{-20}
\sqrt{2}\cdot10^{-10} | \sqrt{3}\cdot10^{-10}
(0.0000003, 1) | (0.0000004, 1)
\{0.0000003\} | \{0.0000004\}
x=0.0000003 | x=0.0000004
x > 0.0000003 | x > 0.0000004
0.0000003x | 0.0000004x
(1,2) | (2,1)
(1,2) | [1,2]
(1,2) | 1,2
1,2,3 | 1,2
3 \pmod 7 | 7 \pmod 3
3 \pmod 7 | 3 \pmod 5
x=5 | y=7
f'(x) | f(x)
A^T | A
A | a_1
x_1 | x_2
\hat{x} | x
\overline{AB} | \overline{AC}
\triangle ABC | \triangle ABD
\log_2 8 | \log_3 8
12.6 | 12.5
3.14 | \pi
5 | 5!
2 | 2\text{ or }3
5 | 5x
1/2 | 2
3/4 | 3
12:30 | 30
3:4 | 4:3
\text{3 a.m.} | \text{3 p.m.}
\text{Tuesday} | Monday
\{HHT, HTH\} | \{HHT, HHH\}
P(A) | P(B)
2 north | 2 south
2^3 | 3
3 | 2^3
\frac{2}{4} | \frac{1}{2}
100 | 10^{2}
-5 | 5
(-1,2) | (1,2)
[2,\infty) | (2,\infty)
[2,\infty) | [2,-\infty)
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix}1&2\end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix}
50\% | 0.005
5 | 5\%\%
6 | 2\text{ }3
23 | 2 3
1\frac{1}{2} | 1\cdot\frac{1}{2}
11/2 | 1 1/2
5 squared | 5
5 or more | 5
2+3i | 2-3i
i | 1
e | 1
3e5 | 3
101_2 | 101_3
1e16 | 16
A, C | C, B
A, B, C | C, B, A
x^2+1 | x^2-1
2(3) | 5
\sin x | \cos x
ABCD | DCBA
\text{CAT} | ACT
stop | post
\sqrt{2} | 1.41
10 | 10^\circ C^2 F
x<3 | x>3
x \le 3 | x<3
5\text{ cm} | 5\text{ kg}
5\text{ m}^2 | 5\text{ m}
\$5 | 5 cents
5 | 5 cents and 3
5\% | 5 million
100^\circ C | 100^\circ F
30° | 30 radians
12 | 1 2
12 | 1\,2
123 | 12\,3
1234 | 123\,4
1234567 | 1 234 5678
3.5 | 3,5
3 | 3,5
\frac{1}{2} | 12
\frac12 | \frac21
0.333 | \frac13
0.33 | \frac13
2.72 | e
2\pi | 6.28
10^{-8} | 0
10^{-20} | 10^{-21}
0 | 10^{-12}
0 | 0.0000001
1 | 1.0000001
1000000 | 1000001
10^{100} | 10^{100}+1
x^2 | x^{20}
x^{12} | x^{1}2
2x | 2X
A+B | a+b
v_1 | v_2
v_{12} | v_{21}
1010_2 | 1010_3
1010_2 | 10
A_{16} | 10
\log_2 x | \log_3 x
\sqrt[3]{x} | \sqrt{x}
x=3 | y=3
f(x)=2x | g(x)=2x+1
(1,2,3) | (1,3,2)
(1,2) | \{1,2\}
[1,2) | (1,2]
(-\infty,2) | (-\infty,2]
\{1,2\} | \{1,2,3\}
\{1,2\} | \{1\}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&3\\2&4\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{vmatrix}1&2\\3&4\end{vmatrix}
x>2 | x\ge2
x>2 | x<2
\text{odd} | \text{even}
\text{yes} | \text{no}
\text{increasing} | \text{decreasing}
MAD | DAM
listen | silent
B, C, A | A, B, C
\text{A, B} | \text{B, C}
2:3 | 3:2
1:2 | 12
3:15 | 3:51
\text{3:15 am} | \text{3:15 pm}
\sin x | \sin y
x' | x
\bar{x} | x
A^{-1} | A
A^{T} | A^{-1}
\overline{AB} | \overline{CD}
AB | BA
3i | 3
3i | 3j
i | -i
2+3i | 3+2i
e^{2} | 2e
5 thousand | 5 million
2 dozen | 2
3 hundred | 3
1/3 | 0.3
11 | 1 + 1
4 | 2+2
2^{10} | 1024
1024 | 2^{10}
-7 | 7
-(3) | 3
3 | -(-(-3))
5 mod 7 | 5 mod 9
x \equiv 1 \pmod 3 | x \equiv 1 \pmod 5
10! | 10
n! | n
\binom{5}{2} | \binom{5}{1}
|x| | x
\lfloor x\rfloor | \lceil x\rceil
\lim_{x\to0} x | \lim_{x\to1} x
C_5^2 | C_6^2
\Delta | \delta
\Omega | \omega
half | quarter
seven | eight
north | south
\text{12 apples} | \text{13 apples}
12 apples | 13 apples
two thirds | one third
68.183 | \approx 68.183
"""


@pytest.mark.parametrize("line", WRONG.strip().splitlines())
def test_wrong(line):
    label, answer = line.split(" | ")
    assert same_answer(answer, label) is False
