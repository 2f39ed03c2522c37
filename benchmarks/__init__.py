"""Questions about speed and memory, each answered by one script; see README.md.

`python -m benchmarks.step_time`, `benchmarks.capture_cost`, `benchmarks.compile_time`.
"""
