"""The engine behind HTTP, as llama-server and OpenAI speak it (extra `serve`).

It is the reference that other servers' clients and adapters are tried against: correct and bounded,
on loopback only. It is not a production server.
"""

from reference.serve.app import create_app, listen, serve
from reference.serve.desk import Limits

__all__ = ["Limits", "create_app", "listen", "serve"]
