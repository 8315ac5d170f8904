"""The specification of the grammar: typed values, spellings of each at random, and answers that are near and not it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from random import Random

ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
UNITS = (
    ("cm", ("cm", r"\text{ cm}", " centimeters", r"\,\mathrm{cm}"), ("m", "mm", "kg")),
    ("m/s", ("m/s", r"\text{ m/s}", " meters per second", r"\ \mathrm{m\,s^{-1}}"), ("km/h", "m/s^2", "m")),
    ("kg", ("kg", r"\text{ kg}", " kilograms", r"~\mathrm{kg}"), ("g", "lb", "km")),
    ("hours", (" hours", r"\text{ hours}", " h", r"\text{ hr}"), ("minutes", "days")),
    ("cm^2", (r"\text{ cm}^2", " square centimeters", r"\,\mathrm{cm}^{2}"), ("cm", "m^2")),
    ("apples", (" apples", r"\text{ apples}", " red apples"), ("pears",)),
)
WORDS = ("Paris", "even", "parallelogram", "Monday", "increasing", "hydrogen", "north", "triangle")


@dataclass(frozen=True)
class Example:
    """A reference, spellings that state it, and answers near it that do not."""

    kind: str
    reference: str
    right: tuple[str, ...]
    near: tuple[str, ...]


def examples(seed: int) -> Iterator[Example]:
    """Examples of every kind in turn, without end."""
    random = Random(seed)
    makers = tuple(KINDS.items())
    while True:
        for kind, make in makers:
            reference, right, near = make(random)
            yield Example(kind, reference, tuple(right), tuple(text for text in near if text))


Made = tuple[str, list[str], list[str]]


def signed(random: Random, low: int = 1, high: int = 99) -> int:
    return random.choice((1, -1)) * random.randint(low, high)


def integer(random: Random) -> Made:
    n = signed(random, 0, 10 ** random.randint(1, 6))
    grouped = f"{n:,}"
    right = [
        str(n),
        grouped,
        grouped.replace(",", "{,}"),
        grouped.replace(",", r",\!"),
        f"{n}.0",
        str(n).replace("-", "−"),
        f"x = {n}",
    ]
    if n > 0:
        right += [f"+{n}", f"0{n}", f"{n - 1}+1", words(n), f"the answer is {n}"]
    near = [
        str(n + 1),
        str(-n) if n else "1",
        f"{n}1",
        f"{n}.5",
        f"{n} or {n + 1}",
        f"about {n}",
        f"{n}x" if n else "",
        f"not {n}",
        f"{n}, {n + 2}",
    ]
    return str(n), right, near


def words(n: int) -> str:
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + (f"-{ONES[n % 10]}" if n % 10 else "")
    if n < 1000:
        return f"{ONES[n // 100]} hundred" + (f" and {words(n % 100)}" if n % 100 else "")
    head, rest = divmod(n, 1000)
    return f"{words(head)} thousand" + (f" {words(rest)}" if rest else "") if n < 10**6 else str(n)


def decimal(random: Random) -> Made:
    digits, decimals = signed(random, 1, 10**5), random.randint(1, 4)
    value = Fraction(digits, 10**decimals)
    sign, text = ("-" if digits < 0 else ""), f"{abs(digits) // 10**decimals}.{abs(digits) % 10**decimals:0{decimals}d}"
    right = [
        sign + text,
        f"{sign}{text}0",
        rf"{sign}\frac{{{abs(digits)}}}{{{10**decimals}}}",
        rf"{digits} \times 10^{{-{decimals}}}",
        f"{digits}e-{decimals}",
    ]
    near = [
        f"{sign}{text}1",
        str(digits),
        ("" if sign else "-") + text,
        str(float(value * 10)),
        rf"\approx {sign}{text}",
    ]
    return sign + text, right, near


def fraction(random: Random) -> Made:
    top, bottom = random.randint(1, 40), random.choice((3, 7, 9, 11, 13, 17))
    top += top % bottom == 0
    sign = random.choice(("", "-"))
    k = random.randint(2, 5)
    right = [
        rf"{sign}\frac{{{top}}}{{{bottom}}}",
        f"{sign}{top}/{bottom}",
        rf"{sign}\dfrac{{{top}}}{{{bottom}}}",
        rf"{sign}\frac{{{k * top}}}{{{k * bottom}}}",
        rf"{sign}{{{top} \over {bottom}}}",
    ]
    if top > bottom:
        right += [
            rf"{sign}{top // bottom}\frac{{{top % bottom}}}{{{bottom}}}",
            rf"{sign}{top // bottom} {top % bottom}/{bottom}",
        ]
    near = [
        rf"{sign}\frac{{{bottom}}}{{{top}}}",
        rf"\frac{{{top}}}{{{bottom + 1}}}",
        f"{sign}{top / bottom:.3f}",
        f"{top}:{bottom}",
        f"{sign}{top}{bottom}",
        f"{top}, {bottom}",
    ]
    return rf"{sign}\frac{{{top}}}{{{bottom}}}", right, near


def percentage(random: Random) -> Made:
    n = random.randint(2, 400)
    right = [rf"{n}\%", f"{n}%", f"{n} percent", str(Fraction(n, 100)), rf"{n}\text{{ \%}}", f"{n} per cent"]
    return rf"{n}\%", right, [rf"{n + 1}\%", rf"0.{n}\%" if n != 1 else "", rf"{n}0\%", f"{n} cm"]


def quantity(random: Random) -> Made:
    n = random.randint(2, 500)
    unit, spellings, others = random.choice(UNITS)
    reference = rf"{n}\text{{ {unit}}}"
    right = [f"{n}{spelling}" for spelling in spellings] + [
        str(n),
        rf"\text{{{n} {unit}}}",
        f"{n} {unit}",
        f"x = {n}{spellings[0]}",
    ]
    return reference, right, [f"{n} {other}" for other in others] + [f"{n + 1} {unit}", f"about {n} {unit}"]


def money(random: Random) -> Made:
    cents = random.randint(101, 99999)
    text = f"{cents // 100:,}.{cents % 100:02d}"
    right = [
        rf"\${text}",
        f"${text}",
        f"{text} dollars",
        text,
        text.replace(",", ""),
        f"{cents} cents",
        rf"\text{{{text} dollars}}",
        f"US${text}",
    ]
    near = (
        [f"€{text}", f"{text} cents", f"${cents}", rf"-\${text}", rf"\${cents // 100}"]
        if cents % 100
        else [f"€{text}", f"{text} cents"]
    )
    return rf"\${text}", right, near


def surd(random: Random) -> Made:
    a, b, c = random.randint(1, 9), random.randint(2, 9), random.choice((2, 3, 5, 6, 7, 10))
    reference = rf"{a}+{b}\sqrt{{{c}}}"
    right = [
        reference,
        rf"{b}\sqrt{{{c}}}+{a}",
        rf"{a}+\sqrt{{{b * b * c}}}",
        rf"{a} + {b} \cdot {c}^{{1/2}}",
        f"{a}+{b}√{c}",
        f"{a} + {b}sqrt({c})",
        rf"\frac{{{2 * a}+{2 * b}\sqrt{{{c}}}}}{{2}}",
    ]
    near = [
        rf"{a}-{b}\sqrt{{{c}}}",
        rf"{b}+{a}\sqrt{{{c}}}" if a != b else "",
        rf"{a}+{b}\sqrt{{{c + 1}}}",
        rf"{a}+\sqrt{{{b * c}}}",
        rf"{a}\pm{b}\sqrt{{{c}}}",
        f"{a + b * c**0.5:.4f}",
    ]
    return reference, right, near


def polynomial(random: Random) -> Made:
    p, q = random.sample(range(1, 12), 2)
    reference = f"x^2+{p + q}x+{p * q}"
    right = [
        reference,
        f"(x+{p})(x+{q})",
        f"{p * q}+{p + q}x+x^2",
        rf"x(x+{p + q})+{p * q}",
        f"x² + {p + q}x + {p * q}",
        f"f(x) = x^2 + {p + q}x + {p * q}",
        f"x**2+{p + q}*x+{p * q}",
    ]
    near = [
        f"(x-{p})(x-{q})",
        f"x^2+{p + q}x-{p * q}",
        f"y^2+{p + q}y+{p * q}",
        f"(x+{p})(x+{q + 1})",
        f"x^2+{p + q}x",
        str(p * q),
    ]
    return reference, right, near


def point(random: Random) -> Made:
    a, b = random.sample(range(-20, 20), 2)
    right = [
        f"({a},{b})",
        f"({a}, {b})",
        rf"\left({a},\,{b}\right)",
        f"(x,y)=({a},{b})",
        f"x={a}, y={b}",
        f"y = {b}, x = {a}",
    ]
    near = [
        f"({b},{a})",
        f"({a},{b + 1})",
        f"[{a},{b}]",
        f"{a},{b}",
        f"({a},{b},0)",
        rf"\{{{a},{b}\}}",
        str(a),
        f"({a},{b}]",
    ]
    return f"({a},{b})", right, near


def several(random: Random) -> Made:
    a, b, c = random.sample(range(-50, 50), 3)
    right = [
        f"{a}, {b}, {c}",
        f"{c},{a},{b}",
        rf"\{{{b}, {a}, {c}\}}",
        f"{a}, {b} and {c}",
        rf"{a}, {b}, \text{{ and }} {c}",
        f"{a}; {b}; {c}",
        rf"x_1={a}, x_2={b}, x_3={c}",
        f"x = {a}, {b}, {c}",
        rf"x={a} \text{{ or }} x={b} \text{{ or }} x={c}",
    ]
    near = [f"{a}, {b}", f"{a}, {b}, {c + 1}", f"{a}, {b}, {c}, {c}", f"({a},{b},{c})", f"{a}", f"{a}, {b}, {b}"]
    return f"{a}, {b}, {c}", right, [text for text in near if text]


def interval(random: Random) -> Made:
    a = random.randint(-20, 10)
    b = a + random.randint(1, 20)
    left, right_sign = random.choice((("(", ")"), ("[", "]"), ("(", "]"), ("[", ")")))
    low, high = ("<" if left == "(" else r"\le"), ("<" if right_sign == ")" else r"\le")
    reference = f"{left}{a},{b}{right_sign}"
    right = [
        reference,
        f"{left}{a}, {b}{right_sign}",
        rf"\left{left}{a},{b}\right{right_sign}",
        f"{a} {low} x {high} {b}",
        rf"x \in {left}{a},{b}{right_sign}",
        rf"\{{x \mid {a} {low} x {high} {b}\}}",
    ]
    turned = {"(": "[", "[": "(", ")": "]", "]": ")"}
    near = [
        f"{turned[left]}{a},{b}{right_sign}",
        f"{left}{a},{b + 1}{right_sign}",
        f"{left}{a},{b}{turned[right_sign]}",
        rf"{a} {low} x",
        str(b),
        f"x = {b}",
    ]
    return reference, right, near


def half_lines(random: Random) -> Made:
    a = random.randint(-20, 10)
    b = a + random.randint(1, 20)
    reference = rf"(-\infty,{a})\cup({b},\infty)"
    right = [
        reference,
        rf"({b}, \infty) \cup (-\infty, {a})",
        rf"x<{a} \text{{ or }} x>{b}",
        f"x < {a} or x > {b}",
        rf"x>{b} \lor x<{a}",
        rf"\mathbb{{R}} \setminus [{a},{b}]",
        rf"x\in(-\infty,{a})\cup({b},+\infty)",
    ]
    near = [
        rf"(-\infty,{a}]\cup({b},\infty)",
        rf"(-\infty,{a})\cap({b},\infty)",
        f"({a},{b})",
        rf"({b},\infty)",
        f"x<{a} and x>{b}",
        rf"x<{a} \text{{ or }} y>{b}",
    ]
    return reference, right, near


def matrix(random: Random) -> Made:
    a, b, c, d = (signed(random, 0, 9) for _ in range(4))
    body = rf"{a} & {b} \\ {c} & {d}"
    reference = rf"\begin{{pmatrix}}{body}\end{{pmatrix}}"
    right = [
        reference,
        rf"\begin{{bmatrix}} {body} \end{{bmatrix}}",
        rf"\left[\begin{{array}}{{cc}}{body}\end{{array}}\right]",
        f"[[{a},{b}],[{c},{d}]]",
        rf"\begin{{pmatrix}}{a}.0&{b}\\{c}&{d}\\\end{{pmatrix}}",
    ]
    near = [
        rf"\begin{{pmatrix}}{a}&{b}\\{c}&{d + 1}\end{{pmatrix}}",
        rf"\begin{{vmatrix}}{body}\end{{vmatrix}}",
        f"({a},{b},{c},{d})",
        rf"\begin{{pmatrix}}{a}&{c}\\{b}&{d}\end{{pmatrix}}" if b != c else "",
    ]
    return reference, right, near


def ratio(random: Random) -> Made:
    a, b = random.choice(((2, 3), (5, 4), (7, 2), (3, 8)))
    k = random.randint(2, 9)
    right = [f"{a}:{b}", f"{k * a}:{k * b}", f"{a} : {b}", rf"{a}\text{{ to }}{b}", f"{a}/{b}"]
    return f"{a}:{b}", right, [f"{b}:{a}", f"{a}:{b + 1}", str(a), f"{a}:{b}:1", f"{a},{b}"]


def ends(random: Random) -> Made:
    a = random.randint(2, 60)
    b = a + random.randint(1, 30)
    right = [f"{a}-{b}", f"{a} - {b}", f"{a}–{b}", f"{a} to {b}", f"from {a} to {b}", f"pages {a}-{b}"]
    return f"{a}-{b}", right, [str(a - b), f"{b}-{a}", f"{a}-{b + 1}", f"{a + 1}-{b + 1}", str(a)]


def date(random: Random) -> Made:
    year, month, day = random.randint(1900, 2030), random.randint(1, 12), random.randint(1, 28)
    name = MONTHS[month - 1]
    right = [
        f"{year}-{month:02d}-{day:02d}",
        f"{name} {day}, {year}",
        f"{day} {name} {year}",
        f"{month}/{day}/{year}",
        f"{name[:3]} {day}, {year}",
        rf"\text{{{name} {day}, {year}}}",
    ]
    near = [
        f"{year + 1}-{month:02d}-{day:02d}",
        f"{name} {day + 1}, {year}",
        f"{MONTHS[month % 12]} {day}, {year}",
        str(year),
        str(year - month - day),
    ]
    return f"{name} {day}, {year}", right, near


def time(random: Random) -> Made:
    hour, minute = random.randint(1, 11), random.randint(0, 59)
    right = [
        f"{hour}:{minute:02d} PM",
        f"{hour}:{minute:02d} p.m.",
        f"{hour + 12}:{minute:02d}",
        rf"{hour}:{minute:02d}\text{{ pm}}",
        f"{hour}:{minute:02d}",
    ]
    return (
        f"{hour}:{minute:02d} PM",
        right,
        [
            f"{hour}:{minute:02d} AM",
            f"{hour}:{(minute + 1) % 60:02d} PM",
            f"{hour}.{minute:02d}",
            str(hour * 60 + minute),
        ],
    )


def choice(random: Random) -> Made:
    letter, other = random.sample("ABCDE", 2)
    right = [
        letter,
        f"({letter})",
        f"{letter}.",
        rf"\text{{({letter})}}",
        rf"\textbf{{({letter})}} 12",
        f"Option {letter}",
        f"{letter}) 7",
    ]
    return (
        letter,
        right,
        [other, f"({other})", f"{letter} or {other}", f"not {letter}", f"{other}, {letter}", f"{letter}{other}"],
    )


def word(random: Random) -> Made:
    first, second = random.sample(WORDS, 2)
    right = [
        first,
        first.lower(),
        first.upper(),
        rf"\text{{{first}}}",
        f"{first}.",
        f"the {first}",
        rf"\mathrm{{{first}}}",
    ]
    return rf"\text{{{first}}}", right, [second, f"not {first}", f"{first} or {second}", f"{first}s and {second}", "7"]


def equation(random: Random) -> Made:
    a, b = random.randint(2, 9), random.randint(1, 9)
    reference = f"y={a}x+{b}"
    right = [reference, f"y = {b} + {a}x", f"{a}x + {b}", f"{a}x - y + {b} = 0", f"{2 * a}x+{2 * b}=2y", f"y-{b}={a}x"]
    return reference, right, [f"y={a}x-{b}", f"x={a}y+{b}", f"y={a + 1}x+{b}", f"{a}x+{b}=0", str(b)]


def complex_number(random: Random) -> Made:
    a, b = signed(random, 1, 20), random.randint(2, 20)
    reference = f"{a}+{b}i"
    right = [
        reference,
        f"{a} + {b} i",
        f"{b}i+{a}" if a >= 0 else f"{b}i{a}",
        rf"{a}+i\,{b}",
        rf"{a}+{b}\mathrm{{i}}",
        f"z = {a}+{b}i",
        rf"\frac{{{2 * a}+{2 * b}i}}{{2}}",
    ]
    return reference, right, [f"{a}-{b}i", f"{b}+{a}i" if a != b else "", str(a), f"{a}+{b}", f"{a + 1}+{b}i"]


def plus_minus(random: Random) -> Made:
    a, c = random.randint(1, 9), random.choice((2, 3, 5, 7))
    reference = rf"{a}\pm\sqrt{{{c}}}"
    right = [
        reference,
        rf"{a}+\sqrt{{{c}}}, {a}-\sqrt{{{c}}}",
        rf"x = {a} \pm \sqrt{{{c}}}",
        rf"\{{{a}-\sqrt{{{c}}}, {a}+\sqrt{{{c}}}\}}",
        rf"x={a}-\sqrt{c} \text{{ or }} x={a}+\sqrt{c}",
    ]
    return reference, right, [rf"{a}+\sqrt{{{c}}}", rf"{a}\pm\sqrt{{{c + 1}}}", rf"-{a}\pm\sqrt{{{c}}}", str(a)]


def based(random: Random) -> Made:
    base = random.choice((2, 3, 5, 8))
    digits = "".join(str(random.randrange(base)) for _ in range(random.randint(3, 6))).lstrip("0") or "1"
    right = [f"{digits}_{base}", f"{digits}_{{{base}}}", digits, f"({digits})_{base}", rf"\text{{{digits}}}_{{{base}}}"]
    near = [f"{digits}_{base + 1}", f"{digits}0_{base}", f"{digits}_{{10}}", f"1{digits}"]
    return f"{digits}_{base}", right, near


def congruence(random: Random) -> Made:
    m = random.randint(3, 30)
    r = random.randrange(m)
    right = [
        rf"x \equiv {r} \pmod{{{m}}}",
        rf"{r} \pmod {m}",
        rf"x\equiv {r + m} \pmod{{{m}}}",
        f"{r - m} (mod {m})",
        rf"{r}\text{{ mod }}{m}",
    ]
    return (
        rf"x\equiv {r}\pmod{{{m}}}",
        right,
        [rf"x \equiv {r + 1} \pmod{{{m}}}", rf"x\equiv {r}\pmod{{{m + 1}}}", rf"y\equiv {r}\pmod{{{m}}}", str(r)],
    )


def angle(random: Random) -> Made:
    n = random.randint(1, 359)
    right = [
        rf"{n}^\circ",
        rf"{n}^{{\circ}}",
        f"{n}°",
        f"{n} degrees",
        str(n),
        rf"\theta = {n}^\circ",
        rf"{n}\text{{ degrees}}",
    ]
    return rf"{n}^\circ", right, [rf"{n + 1}^\circ", f"{n} radians", rf"{n}\pi", rf"{n}\%"]


def labelled(random: Random) -> Made:
    a, b = random.sample(range(2, 60), 2)
    reference = f"{a} hens and {b} goats"
    right = [
        reference,
        f"{b} goats and {a} hens",
        f"{a} hens, {b} goats",
        rf"{a}\text{{ hens}}, {b}\text{{ goats}}",
        f"{a} and {b}",
    ]
    return (
        reference,
        right,
        [f"{b} hens and {a} goats", f"{a} hens", f"{b} and {a}", f"{a} hens and {b + 1} goats", f"{a + b}"],
    )


def family(random: Random) -> Made:
    k = random.randint(2, 9)
    reference = rf"\frac{{\pi}}{{{k}}}+2k\pi, k\in\mathbb{{Z}}"
    right = [
        reference,
        rf"\frac{{\pi}}{{{k}}}+2n\pi, n \in \mathbb{{Z}}",
        rf"x = \frac{{\pi}}{{{k}}} + 2\pi n, \text{{ where }} n \text{{ is an integer}}",
        rf"2m\pi+\frac{{\pi}}{{{k}}} \quad (m\in\mathbb{{Z}})",
    ]
    return (
        reference,
        right,
        [
            rf"\frac{{\pi}}{{{k}}}+n\pi, n \in \mathbb{{Z}}",
            rf"\frac{{\pi}}{{{k + 1}}}+2k\pi, k\in\mathbb{{Z}}",
            rf"\frac{{\pi}}{{{k}}}",
            rf"\frac{{\pi}}{{{k}}}+2k\pi, k\in\mathbb{{N}}",
        ],
    )


def factorials(random: Random) -> Made:
    n = random.randint(4, 9)
    k = random.randint(2, n - 2)
    value = 1
    for j in range(k):
        value = value * (n - j) // (j + 1)
    right = [
        str(value),
        rf"\binom{{{n}}}{{{k}}}",
        f"C({n},{k})",
        f"{n}C{k}",
        rf"\frac{{{n}!}}{{{k}!{n - k}!}}",
        rf"{n} \text{{ choose }} {k}",
        rf"{{}}_{{{n}}}C_{{{k}}}",
    ]
    return str(value), right, [rf"\binom{{{n + 1}}}{{{k}}}", f"{value}!", f"P({n},{k})", f"{n}{k}"]


KINDS: dict[str, Callable[[Random], Made]] = {
    make.__name__: make
    for make in (
        integer, decimal, fraction, percentage, quantity, money, surd, polynomial, point, several, interval,
        half_lines, matrix,
        ratio, ends, date, time, choice, word, equation, complex_number, plus_minus, based, congruence, angle,
        labelled, family,
        factorials,
    )
}  # fmt: skip
