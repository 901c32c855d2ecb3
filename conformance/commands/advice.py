"""`--generation-config`: the sampling that a model's makers advise, instead of the defaults."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reference.sampling import Sampling


def add_advice(parser: Any) -> None:
    """Add the option."""
    parser.add_argument(
        "--generation-config",
        metavar="auto|PATH",
        help="sample as the model's makers advise: auto, by its own generation_config.json (of a "
        "GGUF file, general.sampling keys), or by that of another folder or file",
    )


def advised(options: argparse.Namespace, model: Path) -> Sampling | None:
    """What the option asks for, None where it is not given. Raises ConfigError, WeightsError."""
    from reference.generation_config import advised_sampling

    given = options.generation_config
    if given is None:
        return None
    return advised_sampling(model if given == "auto" else Path(given))
