"""The CPU backend in C: built at first use, driven through ctypes, one call per step of a model.

Python packs weights (`tiles`) and records a model as a flat list of operations (`program`); C runs the list on its own
threads. Nothing here imports torch.
"""
