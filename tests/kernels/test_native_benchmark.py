"""The benchmark of the native operations measures each of them; how fast they are is not asserted."""

from trioengine_kernels.native import benchmark


def test_each_operation_is_measured(library, pool, monkeypatch):
    monkeypatch.setattr(benchmark, "WEIGHT_BYTES", 1 << 20)
    monkeypatch.setattr(benchmark, "BANDWIDTH_BYTES", 3 << 20)
    monkeypatch.setattr(benchmark, "_NUM_RUNS", 1)
    bandwidth = benchmark.measure_bandwidth(library, pool)
    assert bandwidth.read_bytes_per_s > 0
    assert bandwidth.copy_bytes_per_s > 0
    rates = list(benchmark.measure_ops(library, pool))
    names = {rate.name.partition(" ")[0] for rate in rates}
    assert names == {"linear", "attention", "rms_norm", "silu_mul", "rope_write_kv"}
    assert all(rate.seconds > 0 and rate.num_tokens > 0 for rate in rates)
    weights = [rate for rate in rates if rate.name == "linear int4"]
    assert {rate.num_bytes for rate in weights} == {3072 // 8 * (32 + 576 // 32 * 160)}
    assert weights[0].num_flops == 2 * 3072 * 576
