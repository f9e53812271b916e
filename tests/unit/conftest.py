"""Property tests draw the same examples each time and are not judged by the clock: machines under load are slow."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("grpo_dist", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("grpo_dist")
