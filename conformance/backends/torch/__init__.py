"""A second implementation of the SPEC, in torch, on the CPU or on CUDA (SPEC 17).

It shares no arithmetic with `reference`; it was written from the text alone. `backend` moves arrays
in and out; the modules beside it are functions of tensors, one a subject.
"""

from conformance.backends.torch.backend import TorchBackend

__all__ = ["TorchBackend"]
