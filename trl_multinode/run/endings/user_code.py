"""Find out whether an error came from the user's own code: a reward function, a tool, a callback or the script."""

import sys
import sysconfig
import traceback

FRAMEWORKS = {"trl_multinode", "trl", "transformers", "accelerate"}
REWARDS = "_calculate_rewards"  # TRL's method that calls the reward functions
# its frame stands above those of the code that it guards
GUARD = "trl_multinode.run.watch.watchdog"
_paths = sysconfig.get_paths()
INSTALLED = tuple({_paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_users(error: BaseException) -> bool:
    """Return whether the user's code raised `error`, either below a framework's frame or without one.

    A script calls the framework, which calls a reward function, which may call a library: the second change decides.
    A reward function in an installed package is found by the method that calls it.
    """
    below_framework, previous = False, ""
    # the outermost frame first
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if module == GUARD:
            continue
        if package in FRAMEWORKS and not module.startswith("trl.rewards"):
            below_framework = True
        elif below_framework and (
            is_own(code.co_filename, package) or (previous == REWARDS and is_other(package))
        ):
            return True
        previous = code.co_name
    return not below_framework


def is_own(path: str, package: str) -> bool:
    """Return whether a file belongs to no installed package."""
    return package not in FRAMEWORKS and not path.startswith((*INSTALLED, "<frozen", "<string"))


def is_other(package: str) -> bool:
    """Return whether a package is neither Python's nor one that TRL calls itself beside the reward functions."""
    return package not in sys.stdlib_module_names and package not in {"torch", "deepspeed"}
