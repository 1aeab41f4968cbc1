"""Parts of `tools/bench_steps.py`: models, measured rates, bounds, one cell of the table, the table."""
