"""Gives memory that was freed back to the system."""

import ctypes


def return_freed_memory() -> None:
    """Give back what the C library keeps of freed memory, where it can be asked to (glibc).

    Large arrays have pages of their own, which go back at once; smaller ones come from a heap that mostly grows.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
        trim(0)
