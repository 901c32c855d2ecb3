"""What `bitforbit placement` is asked of: a model, a card and a CPU, and how its router chooses."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from conformance.commands.measure.models import config_digest, config_of, prompt_of, threads_of
from conformance.commands.measure.rows import watched
from conformance.paths import model_folder
from reference.errors import RequestError

if TYPE_CHECKING:
    from reference.config import ModelConfig
    from reference.experts import Routing
    from reference.measure.ceiling import Hardware
    from reference.measure.laws import Law
    from reference.measure.placement import Offload, Placement


def dimensions_of(options: argparse.Namespace) -> tuple[str, ModelConfig]:
    """The model's name and configuration: a published one, or of a folder or file."""
    from reference.measure.placement import PUBLISHED, published

    if options.model in PUBLISHED:
        return options.model, published(options.model)
    folder = model_folder(options.model)
    return folder.resolve().name, config_of(folder)


def router_of(config: ModelConfig) -> tuple[int, int]:
    """How many experts there are, and how many a token has. Raises RequestError."""
    if config.sparse is None or not any(config.sparse.layers):
        raise RequestError("model: it has no experts to be placed; give a sparse one")
    return config.sparse.router.experts, config.sparse.router.top_k


def _machine(options: argparse.Namespace) -> tuple[Hardware, Hardware, float | None]:
    """Card, CPU, and the card's memory. Raises RequestError."""
    from reference.measure.ceiling import PASSES, Hardware, card, measured_here

    for pool in ("gpu", "cpu"):
        given = [getattr(options, f"{pool}_{name}") for name in ("bandwidth", "rate")]
        if (given[0] is None) != (given[1] is None):
            raise RequestError(f"--{pool}-bandwidth, --{pool}-rate: each needs the other")
    gpu = card(options.card)
    if options.gpu_rate is not None:
        rates = {options.compute: options.gpu_rate}
        gpu = Hardware("as given", options.gpu_bandwidth, rates, "given")
    gpu.rate(options.compute)
    memory = options.gpu_memory or gpu.memory
    if options.cpu_rate is not None:
        rates = {"float32": options.cpu_rate}
        return gpu, Hardware("as given", options.cpu_bandwidth, rates, "given"), memory
    threads = threads_of(options)
    with watched("measuring", 3 * (PASSES + 1)) as advance:
        return gpu, measured_here(threads, on_run=advance), memory


def traces_of(options: argparse.Namespace) -> tuple[dict[int, Routing], int, str]:
    """A real router's decisions for a text, by layer; its experts; and the model's digest."""
    import numpy as np

    from reference.measure.router import Tracing, joined
    from reference.model import load_model
    from reference.threads import limited_to

    model = load_model(model_folder(options.traced))
    tokens = np.array(prompt_of(model, options.tokens)[0], np.int64)
    tracing = Tracing(model, tokens, min(len(tokens), model.config.max_positions))
    found = []
    with limited_to(threads_of(options)), watched("windows", len(tracing.windows)) as advance:
        for window in tracing.run():
            found.append(window)
            advance()
    layers = {layer: joined([window[layer] for window in found]) for layer in found[0]}
    return layers, tracing.experts, model.digest


def exponent_of(layers: dict[int, Routing], experts: int) -> float:
    """The exponent of Zipf's law that fits a router's calls of its experts best."""
    import numpy as np

    from reference.measure.laws import zipf_exponent

    calls = [np.bincount(r.experts.ravel(), minlength=experts) for r in layers.values()]
    return zipf_exponent([each.tolist() for each in calls])


def _laws(options: argparse.Namespace, config: ModelConfig) -> tuple[tuple[Law | None, ...], str]:
    """How the tokens of each layer choose, and what that is called. Raises RequestError."""
    from reference.measure.laws import traced, uniform, zipf

    experts, chosen = router_of(config)
    sparse = [config.sparse_of(index) is not None for index in range(config.layers)]
    if options.routing == "measured":
        layers, there, _ = traces_of(options)
        k = next(iter(layers.values())).experts.shape[1]
        wanted = [index for index, has in enumerate(sparse) if has]
        if (there, k, list(layers)) != (experts, chosen, wanted):
            raise RequestError(
                f"--routing: {options.traced} has {k} of {there} experts in {len(layers)} layers, "
                f"and the model {chosen} of {experts} in {len(wanted)}; take uniform or zipf"
            )
        each = {layer: traced(routing, experts) for layer, routing in layers.items()}
        laws = tuple(each.get(index) for index in range(config.layers))
        return laws, f"measured, {options.traced}"
    law, name = uniform(experts, chosen), "uniform"
    if options.routing == "zipf":
        exponent, name = options.zipf, "zipf {:g}"
        if exponent is None:
            layers, there, _ = traces_of(options)
            exponent = exponent_of(layers, there)
            name = f"zipf {{:.3f}}, fitted to {options.traced}"
        law, name = zipf(experts, chosen, exponent), name.format(exponent)
    return tuple(law if has else None for has in sparse), name


def offload_of(options: argparse.Namespace) -> tuple[Offload, dict[str, Any]]:
    """What is placed, and what all rows say."""
    from reference.measure.ceiling import Storage
    from reference.measure.machine import this_machine
    from reference.measure.placement import Offload, reused

    name, config = dimensions_of(options)
    experts, chosen = router_of(config)
    reused(1, options.reuse)
    placements_of(options, config)
    longest = config.max_positions - options.reply
    if options.show == "placements" and not 1 <= min(options.p) <= max(options.p) <= longest:
        raise RequestError(
            f"-p: prompts have 1 to {longest} tokens, for a reply of {options.reply} in the "
            f"model's context of {config.max_positions}"
        )
    if longest < 2:
        raise RequestError(f"--reply: the model's context has {config.max_positions} positions")
    laws, routing = _laws(options, config)
    gpu, cpu, memory = _machine(options)
    stored = Storage(options.weights, options.head, options.kv, options.compute, options.compute)
    offload = Offload(
        *(config, stored, "float32", gpu, cpu, options.link, options.latency, laws),
        batch=options.batch,
        chunk=options.chunk,
        memory=memory,
    )
    return offload, {
        **asdict(this_machine()),
        "model": name,
        "digest": config_digest(config),
        "experts": experts,
        "chosen": chosen,
        **{key: getattr(options, key) for key in ("weights", "head", "kv", "compute")},
        "card": gpu.name,
        "source": gpu.source,
        "gpu_memory": memory,
        "cpu_source": cpu.source,
        "threads": None if cpu.spreads is None else threads_of(options),
        **_spread(cpu, "bandwidth", cpu.bandwidth),
        **_spread(cpu, "float32", cpu.rate("float32"), "rate"),
        "cpu_repetitions": None if cpu.spreads is None else cpu.spreads["float32"].repetitions,
        **{key: getattr(options, key) for key in ("link", "latency")},
        "routing": routing,
        **{key: getattr(options, key) for key in ("batch", "reply", "chunk", "seed")},
    }


def _spread(cpu: Hardware, key: str, plain: float, name: str | None = None) -> dict[str, float]:
    found = None if cpu.spreads is None else cpu.spreads[key]
    parts = ("median", "least", "most")
    return {
        f"cpu_{name or key}_{part}": plain if found is None else getattr(found, part)
        for part in parts
    }


def placements_of(options: argparse.Namespace, config: ModelConfig) -> list[Placement]:
    """Those that are asked for. Raises RequestError."""
    from reference.measure.placement import Placement, from_none_to_all

    if options.n is None:
        return from_none_to_all(config.layers)
    told = [Placement.parse(text) for text in dict.fromkeys(options.n.split(","))]
    for placement in told:
        if placement.n_cpu_moe > config.layers:
            raise RequestError(
                f"-n: {placement} is out of range; the model has {config.layers} layers"
            )
    return told
