"""Which change of the configuration explains how an engine differs from the reference.

    python examples/explain.py examples/engines/mlx_lm.py fixtures/families/mixtral \
        sliding_window=null

A backend (a name or a file) runs a model folder as it is; the reference runs it as it is, and after
each change of config.json, on top of those before. A line says how far apart the logits of 48
tokens are, and from which row on. With the right changes, only rounding is left.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np

from conformance.backends import resolve
from conformance.operations import Sessions
from reference import load_model


def main() -> None:
    """Print a line for the folder as it is, and for each change added to those before it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend")
    parser.add_argument("model", type=Path)
    parser.add_argument("change", nargs="*", help="KEY=JSON")
    given = parser.parse_args()
    tokens = np.random.default_rng(1).integers(0, 48, 48)
    sessions = Sessions(resolve(given.backend), {"it": str(given.model.absolute())})
    theirs = np.asarray(sessions.get("it", "float32").forward(tokens=tokens, attention="exact"))
    config = json.loads((given.model / "config.json").read_text())
    for change in ["", *given.change]:
        key, _, value = change.partition("=")
        config |= {key: json.loads(value)} if change else {}
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(given.model / "model.safetensors", folder)
            (Path(folder) / "config.json").write_text(json.dumps(config))
            ours = load_model(folder).forward(tokens)
        apart = np.abs(theirs - ours).max(axis=1)
        first = f"from row {(apart > 1e-4).argmax()} on" if apart.max() > 1e-4 else "rounding"
        print(f"{apart.max():.1e}  {first}  {change or 'as it is'}")


if __name__ == "__main__":
    main()
