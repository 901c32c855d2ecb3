"""Other engines beside the reference, on the same random weights: `tools/compare_engines.py`."""
