#!/usr/bin/env node
// A small bitforbit backend in JavaScript: linear, rms_norm and quantize_int8, exact, in float64.
// The protocol is docs/protocol.md of bitforbit; the arithmetic is SPEC.md, sections 2, 5.4 and 6.

import { readSync, writeSync } from "node:fs";

const BLOCK = 32;

// --- Frames ---------------------------------------------------------------------------------

const ARRAYS = { F32: Float32Array, I8: Int8Array };

/** Exactly `count` bytes of standard input, or null at its end. */
function read(count) {
  const bytes = Buffer.alloc(count);
  for (let have = 0; have < count; ) {
    const got = readSync(0, bytes, have, count - have, null);
    if (got === 0) return null;
    have += got;
  }
  return bytes;
}

function write(bytes) {
  for (let done = 0; done < bytes.length; ) done += writeSync(1, bytes, done);
}

/** The next call: {id, operation, parameters, tensors}, or null at the end of input. */
function readCall() {
  const length = read(8);
  const blob = length && read(Number(length.readBigUInt64LE()));
  if (!blob) return null;
  const size = Number(blob.readBigUInt64LE());
  const { __metadata__: about, ...entries } = JSON.parse(blob.toString("utf8", 8, 8 + size));
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [begin, end] }] of Object.entries(entries)) {
    const bytes = blob.subarray(8 + size + begin, 8 + size + end);
    // A copy, for a typed array must lie aligned in its buffer.
    tensors[name] = { shape, data: ARRAYS[dtype] && new ARRAYS[dtype](new Uint8Array(bytes).buffer) };
  }
  return { ...about, parameters: JSON.parse(about.parameters), tensors };
}

function writeAnswer(about, tensors) {
  const header = { __metadata__: about };
  const parts = [];
  let offset = 0;
  for (const [name, { dtype, shape, data }] of Object.entries(tensors)) {
    header[name] = { dtype, shape, data_offsets: [offset, offset + data.byteLength] };
    parts.push(Buffer.from(data.buffer, data.byteOffset, data.byteLength));
    offset += data.byteLength;
  }
  const text = Buffer.from(JSON.stringify(header));
  const lengths = Buffer.alloc(16);
  lengths.writeBigUInt64LE(BigInt(8 + text.length + offset), 0);
  lengths.writeBigUInt64LE(BigInt(text.length), 8);
  write(Buffer.concat([lengths, text, ...parts]));
}

// --- Arithmetic -----------------------------------------------------------------------------

/** Ties to even. |x| is below 2^51, where adding 1.5 * 2^52 leaves no room for a fraction. */
const rint = (x) => x + 6755399441055744 - 6755399441055744;

/** The one NaN (SPEC 1.3): JavaScript does not say which bits a NaN of arithmetic has. */
function oneNan(y) {
  const bits = new Uint32Array(y.buffer);
  for (let i = 0; i < y.length; i++) if (Number.isNaN(y[i])) bits[i] = 0x7fc00000;
  return y;
}

/** 2^E with 2^(E-1) <= x < 2^E, for x a positive float32. */
function binadeAbove(x) {
  let power = 2 ** (Math.floor(Math.log2(x)) + 1);
  while (power <= x) power *= 2;
  while (power / 2 > x) power /= 2;
  return power;
}

/** Rows of float32 rounded to the grid of each block's largest, as float64; NaN if not finite. */
function align(x, rows, length) {
  const out = new Float64Array(rows * length);
  for (let row = 0; row < rows; row++) {
    if (!x.subarray(row * length, (row + 1) * length).every(Number.isFinite)) {
      out.fill(NaN, row * length, (row + 1) * length);
      continue;
    }
    for (let start = 0; start < length; start += BLOCK) {
      const [from, to] = [row * length + start, row * length + Math.min(start + BLOCK, length)];
      let largest = 0;
      for (let i = from; i < to; i++) largest = Math.max(largest, Math.abs(x[i]));
      const unit = largest > 0 ? binadeAbove(largest) / 2 ** 24 : 1;
      for (let i = from; i < to; i++) out[i] = rint(x[i] / unit) * unit;
    }
  }
  return out;
}

/** The sum of aligned products before its rounding: block sums are exact, and added ascending. */
function dot64(a, i, b, j, length) {
  let total = 0;
  for (let start = 0; start < length; start += BLOCK) {
    let sum = 0;
    const stop = Math.min(start + BLOCK, length);
    for (let k = start; k < stop; k++) sum += a[i * length + k] * b[j * length + k];
    total += sum;
  }
  return total;
}

// --- Operations -----------------------------------------------------------------------------

const OPERATIONS = {
  linear({ x, w, bias }) {
    const [T, K] = x.shape;
    const N = w.shape[0];
    const [left, right] = [align(x.data, T, K), align(w.data, N, K)];
    const y = new Float32Array(T * N);
    for (let i = 0; i < T * N; i++) {
      y[i] = dot64(left, Math.floor(i / N), right, i % N, K); // a Float32Array rounds
      if (bias) y[i] = y[i] + bias.data[i % N];
    }
    return { y: { dtype: "F32", shape: [T, N], data: oneNan(y) } };
  },

  rms_norm({ x, weight }, { eps }) {
    const [T, K] = x.shape;
    const aligned = align(x.data, T, K);
    const y = new Float32Array(T * K);
    for (let t = 0; t < T; t++) {
      const square = dot64(aligned, t, aligned, t, K) / K;
      const r = Math.fround(1 / Math.sqrt(square + eps));
      for (let k = 0; k < K; k++) {
        y[t * K + k] = Math.fround(x.data[t * K + k] * r) * weight.data[k];
      }
    }
    return { y: { dtype: "F32", shape: [T, K], data: oneNan(y) } };
  },

  quantize_int8({ x }) {
    const [T, K] = x.shape;
    const codes = new Int8Array(T * K);
    const scale = new Float32Array(T);
    for (let t = 0; t < T; t++) {
      const row = x.data.subarray(t * K, (t + 1) * K);
      const largest = row.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
      scale[t] = row.every(Number.isFinite) ? largest / 127 : NaN;
      for (let k = 0; scale[t] > 0 && k < K; k++) {
        codes[t * K + k] = Math.max(-127, Math.min(127, rint(Math.fround(row[k] / scale[t]))));
      }
    }
    return {
      codes: { dtype: "I8", shape: [T, K], data: codes },
      scale: { dtype: "F32", shape: [T], data: oneNan(scale) },
    };
  },
};

const HELLO = {
  protocol: 1,
  name: "node",
  operations: Object.keys(OPERATIONS),
  numerics: { operands: "float32", accumulator: "exact", fma: false, kv: "float32" },
};

for (let call = readCall(); call; call = readCall()) {
  const { id, operation, parameters, tensors } = call;
  if (operation === "hello") {
    writeAnswer({ id, status: "ok", hello: JSON.stringify(HELLO) }, {});
  } else if (!Object.hasOwn(OPERATIONS, operation)) {
    writeAnswer({ id, status: "not implemented" }, {});
  } else {
    let results;
    try {
      results = OPERATIONS[operation](tensors, parameters);
    } catch (error) {
      writeAnswer({ id, status: "error", message: String(error) }, {});
      continue;
    }
    writeAnswer({ id, status: "ok" }, results);
  }
}
