"""Model files on disk: finding and fetching them, and reading GGUF and safetensors without copying.

This package knows files and bytes. It does not know what a tensor means to a model, and it never loads torch, so
the server process can read a tokenizer out of a GGUF file.
"""
