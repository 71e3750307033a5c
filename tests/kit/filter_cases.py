"""SQL92 expressions with what RocketMQ 5.3.3 says of one message; tests/interop asks it again."""

from __future__ import annotations

from typing import Final

PROPERTIES: Final = {
    "a": "7",
    "b": "x",
    "t": "true",
    "f": "1.5",
    "s": "it's",
    "e": "5E3",
    "sp": " 7",
    "T": "TRUE",
    "hex": "0x1p3",
    "d": "7d",
    "u": "ä",
    "big": "99999999999999999999",
    "nan": "NaN",
    "inf": "Infinity",
    "neg": "-3",
    "plus": "+7",
    "c": "10",
}

OUTCOMES: Final = """\
true    a > 5
true    a > 5.0
failed  f > 1
true    f > 1.0
failed  f > 5
true    a < c
failed  b < a
false   a = c
true    a = 7
true    a = 7.0
true    a <> m
null    m <> a
true    NOT (a = m)
true    m = n
false   m <> n
true    m is null
false   a is null
true    a is not null
failed  b > 5
refused NOT b > 5
failed  NOT (b > 5)
refused not b > 5
true    a > 5 or b > 5
failed  b > 5 or a > 5
false   t
false   a
null    m
true    not t
null    not m
true    t = true
true    T = true
failed  true = t
true    t = TRUE
true    b = false
false   b = true
true    true
false   false
null    null
null    not null
false   true and false
false   a = 'x'
true    'x' = b
true    'x' = 'x'
refused 'x'
refused 5
true    5 > 3
false   3 > 5
true    5 = 5.0
true    5.0 = 5
false   (a)
true    ((a > 5))
true    (a > 5) = true
true    a > 5 = true
refused a > 5 > 3
true    a = 7 = true
false   a = 7 = 7
false   (a = 7) is null
false   (a = m) is null
true    (m = 7) is null
true    m = 7 is null
true    not (m = 7) is null
true    a in ('7')
true    a in ('7', 'x')
false   a not in ('7')
null    m in ('7')
null    m not in ('7')
refused a in ()
refused a in (7)
refused 'a' in ('a')
true    a contains '7'
true    b not contains 'y'
false   m contains 'y'
false   m not contains 'y'
false   b contains ''
false   b not contains ''
true    b startswith 'x'
true    b endswith 'x'
false   b not startswith 'x'
true    'xyz' contains 'y'
false   5 contains 'y'
refused b contains a
true    a between 1 and 9
refused a between 9 and 1
true    a not between 8 and 9
true    a between f and c
true    a between 1 and 9.5
refused a between '1' and '9'
null    m between 1 and 3
true    a not between 9 and 1
refused a between null and 3
failed  b between 1 and 3
failed  b not between 1 and 3
refused a > 'x'
refused a > true
refused a > null
refused a = null
refused null = a
refused a <> null
null    - a = 7
refused -a
true    -5 < a
true    +5 < a
true    a > -5
true    a > +5
true    neg = -3
true    neg < -2
true    +a = 7
false   +a
refused -(a > 5)
true    plus = 7
failed  sp = 7
failed  e = 5000
true    e = 5E3
true    e = 5000.0
true    hex > 1.0
true    d > 1.0
failed  d > 1
true    sp > 1.0
failed  big > 1
true    big > 1.0
true    nan > 1.0
true    nan = nan
false   nan < 1.0
false   nan = 1.0
true    inf > 1.0
true    a > 0
false   a > 7L
true    a >= 7L
true    a >= 7l
refused a > 0.0
true    a > .5
true    a > 5.
false   a > 5E1
true    a > 5e-1
false   a > 9223372036854775807
refused a > 9223372036854775808
refused a > -9223372036854775808
refused a > 99999999999999999999999
refused a != 7
refused a == 7
true    s = 'it''s'
refused b = "x"
true    a > 5 -- note
true    a > 5 /* note */
true    a /* x */ > 5
refused a > 5 and
refused and
false   a and t
false   t and t
false   t or b
false   a or t
true    not a
refused not 5
refused not 'x'
refused t and 5
refused t and 'x'
refused 5 and t
false   t and true
false   t and null
null    null or t
false   (t) and (a > 5)
false   a = t
true    t = (a > 5)
failed  (a > 5) = t
true    (a > 5) = (b = 'x')
refused (a > 5) < 3
refused a.b = 3
null    $a = 3
true    _a is null
refused ä = 3
true    u = 'ä'
refused AND = 3
refused between = 3
refused contains = 3
false   a is  null
true    A is null
true    a > 5 AND b IS NOT NULL
false   not a is null
false   not a = 7
null    not m = 7
refused a > 5 or 3
refused (5)
true    (5) < a
true    ('x') = b
refused (null) = a
refused true > 5
refused true = 5
false   5 = true
failed  'x' = 5
false   'x' = true
true    true = true
false   a <> 7
false   a <> 7.0
failed  b <> 7
refused NOT a in ('7')
refused not a between 1 and 9
refused a between 1 and 9 between 2 and 3
refused a > 5 in ('x')
false   a > 5 is null
failed  a > 5 = b is null
null    LIKE = 3
true    +(a > 5)
null    -(a > 5) = 7
true    -(a = 7) is null
false   (a > 5) contains 'x'
true    -t is null
true    -5 = -5
true    - (5) = -5
true    -(-5) = 5
true    +'x' = b
null    -'x' = b
true    -'x' is null
true    -true is null
true    -null is null
true    +null is null
true    -m is null
true    not null is null
true    (a in ('7')) = true
true    a in ('7') = true
failed  a = b > 5
false   a = a in ('7')
true    null is null
false   null is not null
false   5 is null
false   'x' is null
true    true is not null
refused 5 in ('5')
true    (a) in ('7')
true    +a in ('7')
true    (a) between 1 and 9
true    a between (1) and (9)
false   a between -9 and -1
null    a between 1 and m
null    m not between 1 and c
null    a not between 1 and m
refused (a = 7) between 1 and 2
false   a between 1 and 5 and t
true    a between 1 and 9 and a in ('7')
true    a between 1 and 9 = true
refused a between true and 3
false   a = -7
true    a = - -7
false   t = -true
null    escape = 1
true    a >= 1 = true = true
true    'a' = 'b' = false
false   'a' contains 'a' contains 'b'
false   a startswith ''
false   m startswith 'x'
false   -a contains '7'
refused 5.0 in ('5')
refused a = 1e400
refused a < 1e400
refused a > 1e-400
refused a > 0e0
true    a > -0
false   neg > -0.5
refused IS = 1
refused TRUE = 1
refused NULL in ('x')
"""

# RocketMQ stops reading where its grammar ends, and leaves out what stands behind it.
STRICTER: Final = (
    "a > --5",
    "a > 00",
    "a > 07",
    "a > 0x5",
    "a-b = 3",
    "a LIKE 'x'",
    "a + 1 > 3",
    "a < 1f",
    "a < 100d",
)


def cases() -> list[tuple[str, str]]:
    """(expression, true, false, null, failed or refused)."""
    return [(line[8:], line[:8].strip()) for line in OUTCOMES.splitlines()]


def encoded(properties: dict[str, str]) -> bytes:
    """As they lie in a record."""
    return "".join(f"{name}\1{value}\2" for name, value in properties.items()).encode()
