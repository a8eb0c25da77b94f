"""What models are made of and how their weights are read.

`config` needs no torch, so that any process may read a model's facts; everything else here does.
"""
