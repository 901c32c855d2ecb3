"""The suite that holds a backend to the specification (SPEC 15 to 20).

From the ground up: a module imports from its own line of this list or from one above it.

* `errors`, `paths`, `generator` (inputs of cases), `golden` (files, which `schemas` describe),
  `bits`, `operations` (what is asked of a backend), `pools` and `crew` (work shared out), and
  `tables` (of a terminal) serve the rest;
* `rules` judge an answer, and compute the bounds that they judge by; `selection` says which cases
  are meant, `results` what came of them, `expectations` which are known to fail;
* `backends` are the doors and the backends that are built in;
* `cases` are the recipes of goldens, and the invariances; `making` makes the goldens;
* `runner` runs a backend through the cases, `exporting` writes them to a folder to be answered;
* `faults` are known mistakes, `variants` legitimate differences;
* `diagnosis` compares a failure with the faults, `calibration` measures the suite by both;
* `fuzzing` judges a backend by cases that are drawn at random;
* `reports` say what was found;
* `skeletons` (of new backends), `pytest_plugin`, and `commands` with `cli`, are what a user meets.
"""
