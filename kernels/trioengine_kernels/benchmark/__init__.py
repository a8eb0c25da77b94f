"""How fast the operations of a card are, beside what the card gives.

`cases` lists them in the shapes of known models, `timers` times, `measure` puts both together and reports nothing of an
operation whose output is wrong, `rates` makes rows of it. On a CPU `trioengine_kernels.native.benchmark` does the same.
"""
