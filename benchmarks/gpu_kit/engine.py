"""The product's engine with requests frozen during an update: `python -m gpu_kit.engine SPEC.json`.

With no request running, an update takes the product's own path; only stage d updates while requests run.
"""

from trl_multinode.engine.main import VllmBackend, main


class FreezingBackend(VllmBackend):
    """An update pauses running requests; they continue with the new weights."""

    drains = False


if __name__ == "__main__":
    main(FreezingBackend)
