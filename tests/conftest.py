"""Settings that must be made before any test module imports torch."""

from trioengine.config import env

env.let_compute_threads_sleep()
