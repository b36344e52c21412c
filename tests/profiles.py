"""How many examples property tests try. Import this before any test module is collected: `conftest` does.

Profiles: `dev` (50 examples), `ci` (500, same ones every time; chosen when CI=true), `nightly` (20,000).
`pytest --hypothesis-profile nightly` picks one by hand.

Hypothesis mixes constants into what it draws that it finds in the modules of the package that are imported by then. So
that examples do not depend on which tests ran before in the same process, `import_package` imports all of them first.
Modules that are made while tests run (inductor's code, in the few tests that compile with it) add constants still:
numbers and texts drawn behind them in the same process may be others.
"""

import importlib
import os
import pkgutil

from hypothesis import HealthCheck, settings

IN_CI = os.environ.get("CI") == "true"
FEWEST_IN_CI = 10  # examples of a law

_slow_is_allowed = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("dev", max_examples=50, deadline=None, suppress_health_check=_slow_is_allowed)
settings.register_profile(
    "ci", settings.get_profile("dev"), max_examples=500, derandomize=True, print_blob=True
)
settings.register_profile("nightly", settings.get_profile("dev"), max_examples=20_000, print_blob=True)
settings.load_profile("ci" if IN_CI else "dev")


def examples(fraction: float, **changes: object) -> settings:
    """Settings with a fraction of the profile's examples (at least 1): for tests whose examples cost much.

    `@examples(0.1)` tries 5, 10 or 2,000 examples in the three profiles, since CI has no time for more than a fifth of
    a fraction, or 10; a factor above 1 tries more. Say why beside the decorator when the law deserves better.
    """
    count = settings.default.max_examples * fraction
    if IN_CI and fraction < 1:
        count = max(count / 5, min(count, FEWEST_IN_CI))
    return settings(max_examples=max(1, round(count)), **changes)  # type: ignore[arg-type]


def import_package() -> None:
    """Import every module of purestep, but for those that need what is not installed."""
    for folder in ("kernels", "pure", "state"):
        package = importlib.import_module(f"purestep.{folder}")
        for module in pkgutil.walk_packages(
            package.__path__, f"{package.__name__}.", onerror=lambda name: None
        ):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if (error.name or "").startswith("purestep"):
                    raise
