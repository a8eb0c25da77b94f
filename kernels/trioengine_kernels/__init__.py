"""The operations that models are made of, one package each.

`<op>/reference.py` is the operation in plain torch: its specification, and what runs where nothing faster exists.
`<op>/__init__.py` is the only place that chooses an implementation. Nothing here knows about models, sequences or
scheduling, and nothing here imports `trioengine`.
"""
