"""Rotary position embedding (SPEC 7)."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from typing import Any

from torch import Tensor

from conformance.backends.torch.arithmetic import canonical
from conformance.backends.torch.elementary import cos, pi, precise, round_float32, sin

Parameters = Mapping[str, Any]


def _real(value: Any) -> Decimal:
    """Take a configured number as the float64 that its JSON text denotes (7.1)."""
    return Decimal(float(value))


def _get(parameters: Parameters, name: str, default: Any) -> Any:
    value = parameters.get(name)
    return default if value is None else value


def rotary_dim(parameters: Parameters) -> int:
    """Return d = int(head_dim * partial_rotary_factor) (7.2)."""
    d = int(parameters["head_dim"] * _get(parameters, "partial_rotary_factor", 1.0))
    if d <= 0 or d % 2:
        raise ValueError(f"rotary dimension {d} is not even and positive")
    return d


def _original(parameters: Parameters) -> Decimal:
    name = "original_max_position_embeddings"
    return _real(_get(parameters, name, parameters.get("max_position_embeddings")))


def first_alike(parameters: Parameters, position: int) -> int:
    """Return the first position with the constants of this one: most kinds have one set."""
    kind = rope_type(parameters)
    if kind == "longrope":
        old = int(_original(parameters))
        return old if position >= old else 0
    return max(position, int(_original(parameters)) - 1) if kind == "dynamic" else 0


def _frequencies(theta: Decimal, d: int) -> list[Decimal]:
    """f(i) = theta^(-2i/d)."""
    return [(-theta.ln() * 2 * i / d).exp() for i in range(d // 2)]


def _linear(parameters: Parameters, f: list[Decimal]) -> list[Decimal]:
    factor = _real(parameters["factor"])
    return [value / factor for value in f]


def _dynamic_theta(parameters: Parameters, d: int, position: int) -> Decimal:
    """Theta of `dynamic` for the token at a position, from its own position alone."""
    old, factor = _original(parameters), _real(parameters["factor"])
    n = max(Decimal(position + 1), old)
    stretch = factor * n / old - (factor - 1)
    return _theta(parameters) * (stretch.ln() * d / (d - 2)).exp()


def _llama3(parameters: Parameters, f: list[Decimal]) -> list[Decimal]:
    factor, old = _real(parameters["factor"]), _original(parameters)
    low, high = _real(parameters["low_freq_factor"]), _real(parameters["high_freq_factor"])

    def stretched(value: Decimal) -> Decimal:
        wavelength = 2 * pi() / value
        if wavelength > old / low:
            return value / factor
        if wavelength < old / high:
            return value
        s = (old / wavelength - low) / (high - low)
        return (1 - s) * value / factor + s * value

    return [stretched(value) for value in f]


def _yarn_range(parameters: Parameters, d: int) -> tuple[Decimal, Decimal]:
    """Return the ends `low` and `high` of yarn's ramp."""
    old, theta = _original(parameters), _theta(parameters)

    def correction(name: str, default: float) -> Decimal:
        beta = _real(_get(parameters, name, default))
        return d * (old / (2 * pi() * beta)).ln() / (2 * theta.ln())

    low, high = correction("beta_fast", 32), correction("beta_slow", 1)
    if _get(parameters, "truncate", True):
        low = low.to_integral_value(ROUND_FLOOR)
        high = high.to_integral_value(ROUND_CEILING)
    low, high = max(low, Decimal(0)), min(high, Decimal(d - 1))
    return low, high + Decimal("0.001") if low == high else high


def _yarn(parameters: Parameters, f: list[Decimal], d: int) -> list[Decimal]:
    factor = _real(parameters["factor"])
    low, high = _yarn_range(parameters, d)
    ramp = [min(max((i - low) / (high - low), Decimal(0)), Decimal(1)) for i in range(d // 2)]
    return [value / factor * r + value * (1 - r) for value, r in zip(f, ramp, strict=True)]


def _yarn_factor(parameters: Parameters) -> Decimal:
    """Return the factor `a` that yarn applies to cos and sin (7.2)."""
    if parameters.get("attention_factor") is not None:
        return _real(parameters["attention_factor"])
    factor = _real(parameters["factor"])

    def g(x: Decimal) -> Decimal:
        return Decimal(1) if factor <= 1 else Decimal("0.1") * x * factor.ln() + 1

    both = [_real(_get(parameters, name, 0)) for name in ("mscale", "mscale_all_dim")]
    return g(both[0]) / g(both[1]) if all(both) else g(Decimal(1))


def _longrope(parameters: Parameters, f: list[Decimal], position: int) -> list[Decimal]:
    name = "short_factor" if position < _original(parameters) else "long_factor"
    if len(parameters[name]) != len(f):
        raise ValueError(f"{name} has {len(parameters[name])} numbers, not {len(f)}")
    return [value / _real(x) for value, x in zip(f, parameters[name], strict=True)]


def _longrope_factor(parameters: Parameters) -> Decimal:
    """Return the factor that longrope applies to cos and sin (7.2)."""
    if parameters.get("attention_factor") is not None:
        return _real(parameters["attention_factor"])
    old = _original(parameters)
    stretch = parameters["max_position_embeddings"] / int(old)
    factor = _real(_get(parameters, "factor", stretch))
    return Decimal(1) if factor <= 1 else (1 + factor.ln() / old.ln()).sqrt()


def _theta(parameters: Parameters) -> Decimal:
    return _real(_get(parameters, "rope_theta", 10000.0))


def rope_type(parameters: Parameters) -> str:
    """Name of the kind, under either of its two keys."""
    kind: str = _get(parameters, "rope_type", _get(parameters, "type", "default"))
    return kind


def constants(parameters: Parameters, position: int = 0) -> tuple[list[float], float]:
    """inv_freq (d/2) and the factor of cos and sin, each rounded to float32 once (7.1, 7.2)."""
    kind, d = rope_type(parameters), rotary_dim(parameters)
    factor = Decimal(1)
    with localcontext(precise()):
        moving = kind == "dynamic"
        theta = _dynamic_theta(parameters, d, position) if moving else _theta(parameters)
        f = _frequencies(theta, d)
        if kind == "linear":
            f = _linear(parameters, f)
        elif kind == "llama3":
            f = _llama3(parameters, f)
        elif kind == "yarn":
            f, factor = _yarn(parameters, f, d), _yarn_factor(parameters)
        elif kind == "longrope":
            f, factor = _longrope(parameters, f, position), _longrope_factor(parameters)
        elif kind not in ("default", "dynamic"):
            raise ValueError(f"rope_type {kind!r} is not supported")
        return [round_float32(value) for value in f], round_float32(factor)


def angles(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """RN32(p * inv_freq): positions (T,) int64, inv_freq (d/2,) or (T, d/2), to (T, d/2) (7.3)."""
    if bool((positions >= 1 << 24).any()):
        raise ValueError("a position is 2^24 or more")
    return positions.float()[:, None] * inv_freq


def cos_sin(angle: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of angles (T, d/2), times the factor (7.3)."""
    return factor * cos(angle), factor * sin(angle)


def rotate(x: Tensor, c: Tensor, s: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first d elements of heads x (T, H, D) by cos and sin (T, d/2) (7.4)."""
    half = c.shape[-1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    c, s = c[:, None, :], s[:, None, :]
    xj, xk = x[..., first], x[..., second]
    out = x.clone()
    out[..., first] = canonical(xj * c - xk * s)
    out[..., second] = canonical(xk * c + xj * s)
    return out
