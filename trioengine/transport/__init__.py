"""ZeroMQ between front ends (trio) and engine cores (blocking): sockets that carry lists of bytes, and where they live.

Knows nothing of what the bytes mean, and nothing of processes.
"""
