"""What the environment says about places, logs and the machine."""

from pathlib import Path

import pytest

from trioengine.config import env
from trioengine.errors import ConfigError


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(env, "_CGROUP", tmp_path)
    return tmp_path


def test_the_cache_is_where_its_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIOENGINE_CACHE", str(tmp_path / "models"))
    assert env.cache_dir() == tmp_path / "models"


def test_the_cache_is_in_the_users_cache_directory_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRIOENGINE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / "trioengine"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / ".cache" / "trioengine"


def test_without_a_home_the_cache_needs_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def expanduser(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TRIOENGINE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", expanduser)
    with pytest.raises(ConfigError, match="TRIOENGINE_CACHE"):
        env.cache_dir()


def test_a_log_level_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOENGINE_LOG_LEVEL", "DEBUG")
    assert env.log_level() == "debug"
    monkeypatch.setenv("TRIOENGINE_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="TRIOENGINE_LOG_LEVEL"):
        env.log_level()


def test_a_containers_limits_bound_what_the_machine_has(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("1048576\n")
    (cgroup / "cpu.max").write_text("50000 100000\n")
    facts = env.hardware_facts()
    assert facts.ram_bytes == 1048576
    assert facts.num_cpus == 1
    assert facts.flops_per_s == env.FLOPS_PER_CPU_PER_S


@pytest.mark.parametrize("content", ["max\n", "max 100000\n", "", "nonsense", None])
def test_without_a_limit_the_machine_itself_counts(cgroup: Path, content: str | None) -> None:
    if content is not None:
        (cgroup / "memory.max").write_text(content)
        (cgroup / "cpu.max").write_text(content)
    facts = env.hardware_facts()
    assert facts.num_cpus >= 1
    assert facts.ram_bytes > 2**28


def test_a_default_log_level_gives_way_to_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOENGINE_LOG_LEVEL", "debug")
    env.set_default_log_level("warning")
    assert env.log_level() == "debug"
    monkeypatch.delenv("TRIOENGINE_LOG_LEVEL")
    env.set_default_log_level("warning")
    assert env.log_level() == "warning"


@pytest.mark.parametrize(("value", "is_off"), [(None, False), ("", False), ("on", False), ("OFF", True)])
def test_the_native_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, value: str | None, is_off: bool) -> None:
    monkeypatch.delenv("TRIOENGINE_CPU_KERNELS", raising=False)
    if value is not None:
        monkeypatch.setenv("TRIOENGINE_CPU_KERNELS", value)
    assert env.are_cpu_kernels_off() is is_off


def test_a_word_that_is_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOENGINE_CPU_KERNELS", "maybe")
    with pytest.raises(ConfigError, match="TRIOENGINE_CPU_KERNELS"):
        env.are_cpu_kernels_off()


@pytest.mark.parametrize(
    ("has_driver", "visible", "may_have"),
    [
        (False, None, False),
        (True, None, True),
        (True, "1,2", True),
        (True, "", False),
        (True, "-1", False),
        (False, "0", False),
    ],
)
def test_a_gpu_is_looked_for_where_the_driver_has_one_and_nobody_hides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_driver: bool, visible: str | None, may_have: bool
) -> None:
    device = tmp_path / "nvidiactl"
    if has_driver:
        device.touch()
    monkeypatch.setattr(env, "_GPU_DEVICES", (tmp_path / "other", device))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert env.may_have_gpu() is may_have
