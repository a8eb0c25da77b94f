"""What models are made of and how their weights are read.

Only `torch_ops` and `native_ops` know how a backend computes; nothing else here needs torch or the native library.
"""
