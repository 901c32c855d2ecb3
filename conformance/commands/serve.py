"""`bitforbit serve`: the engine behind HTTP."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any

from conformance.commands.advice import add_advice, advised
from conformance.commands.common import MODES, OK, count, seconds
from conformance.paths import model_folder
from reference.errors import RequestError

DESCRIPTION = """\
Answer HTTP requests on 127.0.0.1, as llama-server (/completion, /tokenize) and OpenAI
(/v1/completions, /v1/chat/completions, /v1/models) do; also /health and /metrics. Needs the extra
`serve`.

This is the reference that clients and adapters of other servers are tried against: correct and
bounded. It is not a production server.

  bitforbit serve --model fixtures/tiny-dense --port 8080

What a request does not say of sampling is as the protocol has it, or, with --generation-config, as
the model's makers advise.
"""


def add(commands: Any, style: dict[str, Any]) -> None:
    """Add the command and its options."""
    serve = commands.add_parser(
        "serve", help="answer HTTP requests", description=DESCRIPTION, **style
    )
    serve.add_argument(
        "-m", "--model", required=True, metavar="PATH", help="a model folder, or a .gguf file"
    )
    serve.add_argument("--alias", metavar="NAME", help="what requests call the model: its folder")
    serve.add_argument("--port", type=int, default=8080, help="0 takes any that is free")
    serve.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="instead of the model's own"
    )
    add_advice(serve)
    serve.add_argument("--weights", choices=MODES, default="float32", help="(float32)")
    serve.add_argument(
        "--arithmetic", choices=("exact", "float32"), default="exact", help="(exact)"
    )
    serve.add_argument("--exact-prefill", action="store_true", help="never use fast attention")
    serve.add_argument(
        "--max-sequences", type=count, default=256, metavar="N", help="at once; more get a 503"
    )
    serve.add_argument(
        "--max-body", type=count, default=4 << 20, metavar="BYTES", help="more get a 413"
    )
    serve.add_argument(
        "--timeout", type=seconds, default=600.0, metavar="SECONDS", help="for each request"
    )
    serve.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted."""
    from reference.engine import Engine
    from reference.model import load_model

    try:
        from reference.chat import ChatTemplate
        from reference.serve import Limits, create_app, listen, serve
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise RequestError(f"serve: it needs {package}; pip install 'bitforbit[serve]'") from None

    folder = model_folder(options.model)
    limits = Limits(options.max_body, options.max_sequences, options.timeout)
    with listen(options.port) as door:  # before the model is loaded, which may take a while
        model = load_model(folder, options.weights, options.arithmetic)
        template = ChatTemplate.load(folder, options.chat_template)
        name = options.alias or folder.resolve().name
        engine = Engine(model, options.exact_prefill)
        app = create_app(engine, name, template, limits, advised(options, folder))
        print(f"{name}: http://{':'.join(map(str, door.getsockname()))}", flush=True)
        with suppress(KeyboardInterrupt):  # the way to end a server
            serve(app, door)
    return OK
