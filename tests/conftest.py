"""Settings that must be made before any test module is imported."""

import os

from hypothesis import HealthCheck, settings

from trioengine.config import env

# Before torch is: its threads sleep while they wait, as in our own processes, or tests beside each other crawl.
env.let_compute_threads_sleep()

# Before triton is: its kernels run without a GPU, on tensors of the CPU. `make test-gpu` says 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

# No test is judged by the machine's speed. CI takes the same examples every time; at home each run takes new ones.
settings.register_profile(
    "trioengine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=env.variables().get("CI") == "true",
    print_blob=True,
)
settings.load_profile("trioengine")
