"""The device side: runs the steps that `core` plans. Imports torch."""
