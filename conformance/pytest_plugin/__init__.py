"""The suite as pytest items: `pytest --bitforbit-backend my_backend.py` (docs/ci.md).

pytest imports this package wherever bitforbit is installed, so `hooks` imports nothing of the suite
until the option is given; `items` then makes an item of each case.
"""

from conformance.pytest_plugin.hooks import (
    pytest_addoption,
    pytest_configure,
    pytest_make_collect_report,
    pytest_unconfigure,
)

__all__ = [
    "pytest_addoption",
    "pytest_configure",
    "pytest_make_collect_report",
    "pytest_unconfigure",
]
