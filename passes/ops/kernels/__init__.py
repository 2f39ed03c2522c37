"""The ops on CUDA, one Triton launch each. Imported only where Triton is."""
