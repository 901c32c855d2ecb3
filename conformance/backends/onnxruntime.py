"""ONNX Runtime's own kernels on the CPU, one small graph an operation (SPEC 17).

Where ONNX has the operation it is that node; `com.microsoft` has the rest. A graph is written in
ONNX's textual syntax, and its inputs are the arguments, so that nothing is computed outside but
the layout of arrays and of bytes. Every NaN comes back as the one of SPEC 1.3.

MatMulNBits takes float activations, or cuts them into int8 blocks with a scale each; neither is
SPEC 5.5, which has one scale a token. It is given the int8 codes of 5.4 as floats, on the int4
weights as they are, at `accuracy_level` 1 (float32): its kernel is judged, and its choice of
activations is not. Q4_0 and Q8_0 blocks are put into its order of bytes, their codes unchanged.
SPEC 5.9 is what it does by itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.operations import NotImplementedByBackendError

onnx: Any = importlib.import_module("onnx")
onnxruntime: Any = importlib.import_module("onnxruntime")

Array = NDArray[Any]

OPSETS = '<ir_version: 10, opset_import: ["": 24, "com.microsoft": 1]>'
"""Opset 24 is the first that has every standard node used here (Swish came last)."""

TYPES = {"float32": "float", "int64": "int64", "int32": "int32", "uint8": "uint8", "bool": "bool"}
ACTIVATIONS = {"silu": "Swish<alpha=1.0>", "gelu_tanh": 'Gelu<approximate="tanh">'}
GROUP = 32

INT8 = """
    largest = ReduceMax<keepdims=1>(magnitude, last) scale = Div(largest, most)
    quotient = Div(x, scale) rounded = Round(quotient) zero = Equal(scale, nothing)
    codes = Where(zero, nothing, rounded) """
"""The int8 codes of SPEC 5.4, as floats."""


def _opened(model: Any) -> Any:
    """A session of a model, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    content = model.SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


@lru_cache(maxsize=512)
def _session(graph: str) -> Any:
    """A session of a graph in ONNX's textual syntax, which is the same for all sizes."""
    return _opened(onnx.parser.parse_model(graph))


def _session_with(graph: str, constants: Mapping[str, Array]) -> Any:
    """A session of a graph some of whose inputs are constants, so that it can pack them."""
    model = onnx.parser.parse_model(graph)
    inputs = [given for given in model.graph.input if given.name not in constants]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    for name, x in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(x, name))
    return _opened(model)


def _graph(nodes: str, rank: int, inputs: Mapping[str, Array]) -> str:
    """Nodes that make of some inputs, of any size, a float32 tensor `y` of a rank."""
    given = [
        f"{TYPES[x.dtype.name]}[{', '.join(f'{name}_{i}' for i in range(x.ndim))}] {name}"
        for name, x in inputs.items()
    ]
    y = ", ".join(f"y_{i}" for i in range(rank))
    return f"{OPSETS} g ({', '.join(given)}) => (float[{y}] y) {{ {nodes} }}"


def _answer(session: Any, inputs: Mapping[str, Array]) -> Array:
    y: Array = session.run(["y"], inputs)[0]
    y[np.isnan(y)] = np.nan
    return y


def run(nodes: str, rank: int, **inputs: Array | float) -> Array:
    """The output of nodes on inputs; numbers are given as float32."""
    arrays = {
        name: np.ascontiguousarray(x) if isinstance(x, np.ndarray) else np.array(x, np.float32)
        for name, x in inputs.items()
    }
    return _answer(_session(_graph(nodes, rank, arrays)), arrays)


def _number(x: float) -> str:
    """An attribute: a float32 in digits that give it back."""
    return repr(float(np.float32(x)))


def _heads_first(x: Array) -> Array:
    """(T, H, D) as (1, H, T, D)."""
    return np.ascontiguousarray(x.transpose(1, 0, 2)[None])


def _rows_first(y: Array) -> Array:
    """(1, H, T, D) as (T, H, D)."""
    return np.ascontiguousarray(y[0].transpose(1, 0, 2))


class OnnxRuntimeBackend:
    """The operations that ONNX Runtime has a node or a short graph for, in float32."""

    name = "onnxruntime"
    numerics: Mapping[str, Any] = {
        "operands": "float32",
        "accumulator": "float32",
        "fma": True,
        "flush_to_zero": False,
        "kv": "float32",
    }

    def __init__(self, device: str = "cpu") -> None:
        """Compute on the CPU. Raises RuntimeError for another device."""
        if device != "cpu":
            raise RuntimeError(f"its kernels of the CPU are judged, not those of {device}")

    def exp(self, x: Array) -> Array:
        """Exp."""
        return run("y = Exp(x)", 1, x=x)

    def log(self, x: Array) -> Array:
        """Log."""
        return run("y = Log(x)", 1, x=x)

    def sin(self, x: Array) -> Array:
        """Sin."""
        return run("y = Sin(x)", 1, x=x)

    def cos(self, x: Array) -> Array:
        """Cos."""
        return run("y = Cos(x)", 1, x=x)

    def tanh(self, x: Array) -> Array:
        """Tanh."""
        return run("y = Tanh(x)", 1, x=x)

    def sigmoid(self, x: Array) -> Array:
        """Sigmoid."""
        return run("y = Sigmoid(x)", 1, x=x)

    def silu(self, x: Array) -> Array:
        """Swish."""
        return run(f"y = {ACTIVATIONS['silu']}(x)", 1, x=x)

    def gelu_tanh(self, x: Array) -> Array:
        """Gelu, whose approximation is tanh."""
        return run(f"y = {ACTIVATIONS['gelu_tanh']}(x)", 1, x=x)

    def softmax(self, x: Array) -> Array:
        """Softmax."""
        return run("y = Softmax<axis=-1>(x)", 2, x=x)

    def linear(self, x: Array, w: Array, bias: Array | None = None) -> Array:
        """MatMul, and Add where there is a bias."""
        nodes = "t = Transpose<perm=[1, 0]>(w) "
        if bias is None:
            return run(nodes + "y = MatMul(x, t)", 2, x=x, w=w)
        return run(nodes + "p = MatMul(x, t) y = Add(p, b)", 2, x=x, w=w, b=bias)

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """RMSNormalization."""
        return run(f"y = RMSNormalization<epsilon={_number(eps)}>(x, w)", 2, x=x, w=weight)

    def rope(
        self,
        x: Array,
        positions: Array,
        inv_freq: Array,
        factor: float = 1.0,
        interleaved: bool = False,
    ) -> Array:
        """RotaryEmbedding, on cos and sin of its own."""
        options = f"interleaved={int(interleaved)}, rotary_embedding_dim={2 * len(inv_freq)}"
        y = run(
            "p = Cast<to=1>(positions) angle = Mul(p, f) c0 = Cos(angle) s0 = Sin(angle) "
            f"c = Mul(c0, a) s = Mul(s0, a) y = RotaryEmbedding<{options}>(x, c, s)",
            4,
            x=_heads_first(x),
            positions=positions[None, :, None],
            f=inv_freq[None, None],
            a=factor,
        )
        return _rows_first(y)

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
        mode: str = "exact",
    ) -> Array:
        """Attention; com.microsoft's GroupQueryAttention where there are sinks."""
        options = f"scale={_number(q.shape[2] ** -0.5 if scale is None else scale)}"
        if softcap is not None:
            options += f", softcap={_number(softcap)}"
        past = max(0, len(k) - len(q))
        if sinks is not None:
            return _grouped(q, k, v, options, window, sinks)
        inputs = {"q": _heads_first(q), "k": _heads_first(k[past:]), "v": _heads_first(v[past:])}
        outputs, names = "y", "q, k, v"
        if window is not None or len(k) < len(q):
            t, j = np.arange(len(k) - len(q), len(k))[:, None], np.arange(len(k))
            inputs["m"] = (j <= t) & (j > t - (len(k) if window is None else window))
            names += ", m"
        else:
            options += ", is_causal=1"
        if past:
            inputs |= {"pk": _heads_first(k[:past]), "pv": _heads_first(v[:past])}
            outputs, names = "y, ko, vo", f"{names}{'' if 'm' in inputs else ', '}, pk, pv"
        return _rows_first(run(f"{outputs} = Attention<{options}>({names})", 4, **inputs))

    def gated_mlp(
        self, x: Array, gate: Array, up: Array, down: Array, activation: str = "silu"
    ) -> Array:
        """Three MatMul, an activation and a Mul."""
        return run(
            "gt = Transpose<perm=[1, 0]>(gate) ut = Transpose<perm=[1, 0]>(up) "
            "dt = Transpose<perm=[1, 0]>(down) g = MatMul(x, gt) u = MatMul(x, ut) "
            f"a = {ACTIVATIONS[activation]}(g) h = Mul(a, u) y = MatMul(h, dt)",
            2,
            x=x,
            gate=gate,
            up=up,
            down=down,
        )

    def linear_int4(self, x: Array, packed: Array, scales: Array, group: int) -> Array:
        """MatMulNBits on int8 codes; a scale for a whole row is repeated for each group."""
        groups = -(-x.shape[1] // GROUP)
        blocks = np.full((len(packed), groups * GROUP // 2), 0x88, np.uint8)
        blocks[:, : packed.shape[1]] = packed
        each = scales if group else np.repeat(scales, groups, axis=1)
        return _matmul_bits(x, blocks.reshape(len(packed), groups, -1), each, 4)

    def linear_w4a16(
        self, x: Array, packed: Array, scales: Array, group: int, zeros: Array | None = None
    ) -> Array:
        """MatMulNBits; what serves a whole row is repeated for each group of 32."""
        size = group or GROUP
        groups = -(-x.shape[1] // size)
        codes = np.full((len(packed), groups * size // 2), 0x88, np.uint8)
        codes[:, : packed.shape[1]] = packed
        steps = scales if group else np.repeat(scales, groups, axis=1)
        constants = {"w": codes.reshape(len(packed), groups, -1), "s": steps.astype(np.float32)}
        if zeros is not None:
            each = zeros if group else np.repeat(zeros, groups, axis=1)
            pairs = np.pad(each, [(0, 0), (0, groups % 2)])
            constants["z"] = pairs[:, 0::2] | pairs[:, 1::2] << np.uint8(4)
        options = f"K={x.shape[1]}, N={len(codes)}, bits=4, block_size={size}, accuracy_level=1"
        nodes = f"y = com.microsoft.MatMulNBits<{options}>(x, {', '.join(constants)})"
        graph = _graph(nodes, 2, {"x": x, **constants})
        return _answer(_session_with(graph, constants), {"x": x})

    def linear_q4_0(self, x: Array, blocks: Array) -> Array:
        """MatMulNBits, nibbles of neighbours put together."""
        low, high = blocks[..., 2:] & 15, blocks[..., 2:] >> 4
        codes = np.concatenate([low, high], axis=-1)
        return _matmul_bits(x, codes[..., 0::2] | codes[..., 1::2] << 4, _scales(blocks), 4)

    def linear_q8_0(self, x: Array, blocks: Array) -> Array:
        """MatMulNBits of 8 bits, whose zero is 128."""
        return _matmul_bits(x, blocks[..., 2:] ^ np.uint8(128), _scales(blocks), 8)


def _scales(blocks: Array) -> Array:
    """The float16 that each block begins with (N, G)."""
    return np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]


def _matmul_bits(x: Array, codes: Array, scales: Array, bits: int) -> Array:
    """MatMulNBits of the int8 codes of x (T, K) on codes (N, G, bytes) and scales (N, G)."""
    options = f"K={x.shape[1]}, N={len(codes)}, bits={bits}, block_size={GROUP}, accuracy_level=1"
    nodes = (
        f"magnitude = Abs(x) {INT8} p = com.microsoft.MatMulNBits<{options}>(codes, w, s) "
        "y = Mul(p, scale)"
    )
    constants = {
        "w": np.ascontiguousarray(codes),
        "s": scales.astype(np.float32),
        "last": np.array([1]),
        "most": np.array(127, np.float32),
        "nothing": np.array(0, np.float32),
    }
    graph = _graph(nodes, 2, {"x": x, **constants})
    return _answer(_session_with(graph, constants), {"x": x})


def _grouped(q: Array, k: Array, v: Array, options: str, window: int | None, sinks: Array) -> Array:
    """GroupQueryAttention, with sinks and the window of its own."""
    past, rows = len(k) - len(q), len(q)
    if past < 0:
        raise NotImplementedByBackendError("sinks where there are fewer keys than queries")
    if q.shape[2] % 8:
        raise NotImplementedByBackendError("sinks with a head_dim that is no multiple of 8")
    heads = f"num_heads={q.shape[1]}, kv_num_heads={k.shape[1]}"
    local = "" if window is None else f", local_window_size={window}"
    y = run(
        f"y, ko, vo = com.microsoft.GroupQueryAttention<{heads}, {options}{local}>"
        "(q, k, v, pk, pv, seen, total, , , , , sinks)",
        3,
        q=q.reshape(1, rows, -1),
        k=k[past:].reshape(1, rows, -1),
        v=v[past:].reshape(1, rows, -1),
        pk=_heads_first(k[:past]),
        pv=_heads_first(v[:past]),
        seen=np.array([len(k) - 1], np.int32),
        total=np.array([len(k)], np.int32),
        sinks=sinks,
    )
    return y.reshape(q.shape)
