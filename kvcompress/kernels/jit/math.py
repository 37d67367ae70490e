"""exp and tanh of whole vectors, to the last bit or two of fp32."""

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial

from kvcompress.kernels.jit.values import FLOATS, INTS, Value

LN2 = float(np.log(2))
# Of expm1(x) / x where |x| <= ln(2) / 2; the error is below 1e-8.
_fit = Chebyshev.interpolate(lambda x: np.expm1(x) / np.where(x == 0, 1, x) + (x == 0), 5, domain=[-LN2 / 2, LN2 / 2])
COEFFICIENTS = [float(each) for each in _fit.convert(kind=Polynomial).coef]
LOWEST = -87.0  # exp of less is taken as 0
TO_INTEGER = float(1.5 * 2**23)  # added and taken away again, it rounds to an integer, then found in the lowest bits
LN2_HIGH = float(np.floor(LN2 * 2**15) / 2**15)  # times an exponent without rounding
LN2_LOW = LN2 - LN2_HIGH


def exponent_and_rest(x: Value) -> tuple[Value, Value]:
    """2^n and expm1(r), with x = n·ln 2 + r, for x in [-87, 0]; what comes out for other x means nothing."""
    code = x.code
    shifted = x.times_plus(1 / LN2, TO_INTEGER)
    n = shifted - TO_INTEGER
    rest = n.times_plus(-LN2_LOW, n.times_plus(-LN2_HIGH, x))
    series = code.floats(COEFFICIENTS[-1])
    for coefficient in reversed(COEFFICIENTS[:-1]):
        series = series.times_plus(rest, coefficient)
    power = (shifted.bits_as(INTS) << 23) + (127 << 23)
    return power.bits_as(FLOATS), series * rest


def exp(x: Value) -> Value:
    """exp of lanes that are 0 or less; exactly 0 below -87, NaN for NaN."""
    power, rest = exponent_and_rest(x)
    return x.code.floats(0.0).where(x < LOWEST, power.times_plus(rest, power))


def tanh(x: Value) -> Value:
    """tanh of each lane; NaN for NaN."""
    code = x.code
    magnitude = code.call("fabs", x)
    # Beyond 9 it is 1 in fp32. NaN compares to nothing and stays.
    power, rest = exponent_and_rest(code.floats(9.0).where(magnitude > 9.0, magnitude) * -2.0)
    minus_one = power.times_plus(rest, power - 1.0)  # expm1(-2|x|)
    return code.call("copysign", (0.0 - minus_one) / (minus_one + 2.0), x)
