"""Measurements: what each figure is, and how it is taken (the commands of README, Measure).

* All name the `machine`, and let their arms take `turns`; `source` is the model that is measured,
  `server` one behind HTTP.
* Speed: `bench` (prefill and decode), `profile` and `attention` with `stepwise` (what a prefill's
  time goes to), `batching` and `schedule` (many users), `prefix` (a conversation), `speedup`
  (threads and processes).
* What is said: `perplexity`, `orders` (of float32 sums), `router` (which experts), `quantization`
  with `formats`, `group_order` and `bootstrap`.
* What to expect: `ceiling` (the roofline), `problem` (which phase to work at), `placement` of
  experts with the `laws` by which they are chosen.
"""
