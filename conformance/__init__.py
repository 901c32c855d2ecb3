"""The suite that holds a backend to the specification (SPEC 15 to 20).

From the ground up, so that a package imports what stands above it, few modules apart:

* `errors`, `paths`, `generator` (inputs of cases), `golden` (files), `operations` (what is asked of
  a backend) and `crew` (work shared out) are what all the rest needs;
* `rules` judge an answer, and compute the bounds that they judge by;
* `backends` are the doors and the backends that are built in;
* `cases` are the recipes of goldens, and the invariances; `making` makes the goldens;
* `runner` runs a backend through the cases, `expectations` are those that are known to fail;
* `faults` are known mistakes and `variants` legitimate differences; `diagnosis` compares a failure
  with the faults, `calibration` measures the suite by both;
* `fuzzing` judges a backend by cases that are drawn at random;
* `reports`, `pytest_plugin`, `skeletons`, and `commands` with `cli`, are what a user meets.
"""
