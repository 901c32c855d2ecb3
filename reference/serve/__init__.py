"""The engine behind HTTP, in the protocols of llama-server and of OpenAI (SPEC 14; extra `serve`).

It is the reference that clients and adapters of other servers are tried against: correct, bounded,
and on loopback only. It is not a production server.
"""

from reference.serve.app import create_app, listen, serve
from reference.serve.desk import Limits

__all__ = ["Limits", "create_app", "listen", "serve"]
