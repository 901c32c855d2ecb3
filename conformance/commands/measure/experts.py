"""`bitforbit placement --show experts`: how many experts a batch hits, by law and as measured."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from conformance.commands.measure.models import config_digest, threads_of
from conformance.commands.measure.offload import (
    dimensions_of,
    exponent_of,
    router_of,
    traces_of,
)
from conformance.commands.measure.plot import Line, Panel, grouped
from conformance.commands.measure.rows import Columns, Row, shown, span

if TYPE_CHECKING:
    from reference.experts import Routing
    from reference.measure.machine import Spread

COLUMNS: Columns = {
    "model": partial(shown, name="of"),
    "digest": lambda row: row["digest"][:12],
    "experts": lambda row: f"{row['chosen']} of {row['experts']}",
    "tokens": partial(shown, name="tokens"),
    "uniform": lambda row: f"{row['uniform']:.2f}",
    "zipf": lambda row: f"{row['zipf']:.2f}",
    "loads": lambda row: "-" if row["loads"] is None else f"{row['loads']:.2f}",
    "exponent": lambda row: f"{row['exponent']:.3f}",
    "measured, apart": lambda row: _hits(row, "apart"),
    "together": lambda row: _hits(row, "together"),
    "batches": partial(shown, name="repetitions"),
}


def _hits(row: Row, name: str) -> str:
    if row[f"{name}_mean"] is None:
        return "-"
    return f"{row[f'{name}_mean']:.2f}; {span(row, name, form='.4g')}"


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    """How many experts a batch hits: of the model whose router is traced, and of the other one."""
    import numpy as np

    from reference.measure.laws import traced, uniform, zipf
    from reference.measure.machine import this_machine
    from reference.measure.turns import fields

    name, config = dimensions_of(options)
    placed = router_of(config)
    layers, count_of, digest = traces_of(options)
    k = next(iter(layers.values())).experts.shape[1]
    exponent = options.zipf or exponent_of(layers, count_of)
    machine = {**asdict(this_machine()), "threads": threads_of(options)}
    models = [
        (options.traced, digest, count_of, k, layers),
        (name, config_digest(config), *placed, None),
    ]
    for of, its_digest, total, chosen, routed in models:
        laws = [traced(r, total) for r in (routed or {}).values()]
        for tokens in options.passes:
            at = np.array([tokens])
            told = {
                **machine,
                "of": of,
                "digest": its_digest,
                "experts": total,
                "chosen": chosen,
                "tokens": tokens,
                "uniform": float(uniform(total, chosen).distinct(at)[0]),
                "zipf": float(zipf(total, chosen, exponent).distinct(at)[0]),
                "exponent": exponent,
                "loads": float(np.mean([law.distinct(at)[0] for law in laws])) if laws else None,
            }
            apart, together = _hit(routed, total, tokens)
            yield {
                **told,
                "repetitions": None if apart is None else apart.repetitions,
                **fields("apart", apart),
                **fields("together", together),
            }


def _hit(
    routed: dict[int, Routing] | None, experts: int, tokens: int
) -> tuple[Spread | None, Spread | None]:
    """Experts that batches of a text hit, tokens apart from each other and together."""
    import numpy as np

    from reference.measure.laws import distinct_in
    from reference.measure.machine import Spread

    if routed is None:
        return None, None
    counts = [
        [distinct_in(each, experts, tokens, together) for each in routed.values()]
        for together in (False, True)
    ]
    apart, together = (Spread.of(np.concatenate(c).astype(float).tolist()) for c in counts)
    return apart, together


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Experts that a batch hits, by its size."""
    found = []
    for name, mine in grouped(rows, "of").items():
        lines = [
            Line(key, [row["tokens"] for row in mine], [row[key] for row in mine])
            for key in ("uniform", "zipf", "loads")
            if mine[0][key] is not None
        ]
        if mine[0]["apart_mean"] is not None:
            lines += [
                Line(
                    f"measured, {way}",
                    [row["tokens"] for row in mine],
                    [row[f"{way}_mean"] for row in mine],
                    [row[f"{way}_least"] for row in mine],
                    [row[f"{way}_most"] for row in mine],
                )
                for way in ("apart", "together")
            ]
        found.append(Panel(f"experts hit, {name or mine[0]['of']}", "tokens", "", lines, "x"))
    return found
