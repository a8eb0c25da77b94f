"""A GPU that computes: what it is told and gives, its memory, graphs, sampling, and how models come onto it."""
