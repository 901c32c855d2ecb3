"""Settings that every test shares."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "bitforbit",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("bitforbit")
