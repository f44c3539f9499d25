"""Tests the final number of a response (gsm8k), its letter (gpqa), and labels that are one number."""

from __future__ import annotations

from fractions import Fraction

import pytest

from slime.rollout.rewards.gpqa import chosen_letter
from slime.rollout.rewards.gsm8k import final_number, label_number

# fmt: off
NUMBERS = [
    ("so 9 * 2 = 18\n#### 18", 18), ("#### 17\nwait\n#### $18.00", 18),
    ("#### Step 2: 9 * 2\nThat makes **18**", 18),
    (r"in 7 days \boxed{18\text{ eggs}}, that is 2 a day", 18), ("46<|im_end|>", 46), ("46</s>", 46),
    ("a profit of $70,000.", 70000), ("grows by 150%", 150), ("no idea", None), ("10-5", 5),
    ("it is -5", -5), ("it is −5.", -5), ("costs $1,234.50.", Fraction("2469/2")), ("1,2,3", 3),
    ("1, 2, 3", 3), ("#### 3/4", Fraction("3/4")), ("#### 3 1/2", Fraction("7/2")), ("#### 2^3", None),
    ("#### 12:30", None), ("#### 18 cm^2", 18), ("#### 18 eggs per day", 18),
    ("#### 1e-05", Fraction("1/100000")), ("#### $18", 18), ("#### **18**", 18), ("####18", 18),
    ("#### 18.", 18), ("#### -18", -18), ("#### 18%", 18), ("#### 1,234", 1234),
    ("It takes 3/4", Fraction("3/4")), ("it takes 3 1/2 hours.", Fraction("7/2")), ("meet at 12:30", None),
    ("so 2^3", None), ("area is 18 cm^2", 18), ("area is 18 cm²", 18),
    ("the area is 18 square meters.", 18), ("The answer is 18.", 18), ("The answer is $18.", 18),
    ("**Answer: 18**", 18), ("5 million people", 5000000), (r"\boxed{\frac{1}{2}}", Fraction("1/2")),
    (r"\boxed{x = 18}", 18), (r"\boxed{6*3=18}", 18), (r"\boxed{\$18}", 18), (r"\boxed 5<|im_end|>", 5),
    (r"\boxed{5x}", None), (r"\boxed{18 \text{ cm}^2}", 18), ("18 km/h", 18), ("#### 18 (eggs)", 18),
    ("#### 18 dollars and 50 cents", 18), ("#### ١٨", 18), ("#### 18 and then", 18), ("7 is x^2", None),
    ("1e3", 1000), ("The total is $18 for 3 days = $54", 54), (r"Total: \(54\)", 54),
    (r"= \frac{7}{2}", Fraction("7/2")), ("#### 12 345", 12345), ("She has 18 eggs. </answer>", 18),
    ("range 5-10", 10), ("#### 5-10", 5), ("x_2", None), ("room 101.", 101), ("version 2.0", 2),
    ("ratio 3:4", None), ("52_8", None), ("18<|endoftext|><|endoftext|>", 18), ("18\n<end_of_turn>\n", 18),
    (r"= 18 \text{ dollars}", 18), ("2.50 dollars", Fraction("5/2")), ("answer: 18 ✓", 18),
    ("18 / 2 = 9", 9), ("18/2=9", 9), ("#### 3.0e2", 300),
]
LABELS = [
    ("18", 18), (18, 18), (18.0, 18), ("$18", 18), ("18 dollars", 18), ("18 cm^2", 18),
    (1e-05, Fraction("1/100000")), (1e+16, 10000000000000000), ("x\n#### 1,250", 1250),
    (r"\boxed{18}", 18), ("-5", -5), ("50%", 50), ("1e-05", Fraction("1/100000")),
    (r"18 \text{ eggs}", 18),
]
NO_LABELS = [
    "1/2", "3 1/2", "2^3", "12:30", "many", "", "3 4", "x=5 or 6", None, float("nan"), float("inf"), True,
    [1], b'18', "2*3", "52_8", "1,2", "#### ", "nan", "5 x 3", "10-5", "NaN", "18 or 19", {'a': 1},
]
LETTERS = [
    ("The answer is A. This is because option A is the right one, while option B fails.", "A"),
    ("The answer is D. Don't pick C.", "D"), ("The answer is (c).", "C"), ("Answer: I don't know", None),
    (r"\boxed{b}", "B"), ("answer: c", "C"), ("The answer is (C).", "C"), ("Answer: **B**", "B"),
    ("<think>The answer is A.</think>Final answer: D", "D"), (r"\boxed{\text{(B)}}", "B"),
    ("The answer is A. No: the correct option is C", "C"), ("C is the correct choice, not B", "C"),
    ("After some thought:\n\n(D)\n", "D"), ("I choose B because A photon has no mass", "B"),
    ("A photon. I am sure.", None), ("The answer is not A, it is B.", "B"),
    ("The answer isn't A but B.", "B"), ("I would not choose A. I choose B.", "B"),
    ("The answer is A. Wait, no, it's B.", "B"), ("The answer is A. Correction: C.", "C"),
    ("Option C is correct.", "C"), ("Option C is incorrect. The answer is D", "D"),
    ("The answer is D, not C.", "D"), ("The answer is D rather than C", "D"),
    ("The answer is D. Option C is wrong.", "D"),
    ("The answer is D. C is incorrect because A photon is massless.", "D"),
    ("Therefore, the answer is $C$.", "C"), (r"The answer is \(\text{C}\)", "C"),
    (r"\text{Answer: } C", "C"), ("ANSWER: C", "C"), ("**Answer**: C", "C"), ("**Answer:** C", "C"),
    ("Answer:\n\nC", "C"), ("Answer: C) a neutron", "C"), ("Answer: C. a neutron", "C"),
    ("Answer: (C) 42", "C"), ("The correct answer is **(C) neutron**", "C"),
    ("the answer is option C", "C"), ("So it's C", "C"), ("Hence the answer must be C", "C"),
    ("Correct answer: C<|im_end|>", "C"), ("Answer: b</s>", "B"),
    ("The answer is A because B is wrong", "A"), ("The answer is a proton", None), ("Answer: A", "A"),
    ("answer is a", "A"), ("The answer is A or B.", None), ("Answer: A/B", None),
    ("One might think the answer is C, but it's D.", "D"),
    ("The answer is D. Some may say the answer is C, but that is wrong.", "D"), ("答案：C", "C"),
    ("答案是C", "C"), ("Ａnswer: Ｃ", "C"), ("A is wrong. B is wrong. D is wrong.", None),
    ("I think the answer is B", "B"), ("I don't think the answer is B. The answer is A.", "A"),
    ("Answer: I", "I"), ("The answer is I.", "I"), ("We can rule out A and B. The answer is C.", "C"),
    ("Final Answer: D\n\nExplanation: A, B and C are wrong.", "D"),
    ("The best choice is B: because A is too small", "B"),
    ("The answer is B. If you chose A, check your signs.", "B"),
    ("The answer is B. I considered option C first.", "B"), ("B is not correct; C is correct.", "C"),
    ("I'll go with D.", "D"), ("My answer: D (since A fails)", "D"),
    ("The answer is D.\nA common mistake is to pick C.", "D"),
    ("The answer is D. Note that the answer is not C.", "D"), ("The answer is D. It isn't C.", "D"),
    ("The answer is D. You should never choose C.", "D"), ("The answer can't be A. The answer is B", "B"),
    ("Answer: The correct choice is (b)", "B"), ("answer = B", "B"),
    (r"The final answer is: $\boxed{C}$", "C"), ("Option (C)", "C"), ("C", "C"), ("c", "C"), ("(c)", "C"),
    ("c)", "C"), ("C.", "C"), ("**C**", "C"), ("The answer is [C]", "C"), ("The answer is: `C`", "C"),
    ('the answer is "C"', "C"), ("Solution: E", "E"), ("So the correct option is therefore E.", "E"),
    ("A: wrong\nB: wrong\nC: right\nAnswer - C", "C"), ("I pick C over B", "C"),
    ("The answer is C, while B is the second best", "C"),
    ("B. No, wait. The answer is D. B would be the answer if mass were zero.", "D"),
    ("I initially thought the answer was A, however it is B", "B"), ("the answer is actually C", "C"),
    ("Answer is C", "C"), ("The right answer would be D.", "D"),
    ("The correct answer: D. Not A, B or C.", "D"),
]
# fmt: on


@pytest.mark.parametrize(("response", "number"), NUMBERS)
def test_gsm8k_final_number(response, number):
    assert final_number(response) == number


@pytest.mark.parametrize(("label", "number"), LABELS)
def test_gsm8k_label(label, number):
    assert label_number(label) == number


@pytest.mark.parametrize("label", NO_LABELS)
def test_gsm8k_label_that_is_not_one_number(label):
    with pytest.raises(ValueError, match="label must"):
        label_number(label)


@pytest.mark.parametrize(("response", "letter"), LETTERS)
def test_gpqa_letter(response, letter):
    assert chosen_letter(response, "ABCDEFGHIJ") == letter
