"""Runnable examples: a Llama-shaped model with a paged KV cache, on ``backend="piecewise"``.

Read them in this order: ``paged_attention`` (the split op and its cache), ``triton_attention`` (its
GPU kernel), ``llama`` (the model), ``engine`` (continuous batching), ``quickstart`` (everything).
"""
