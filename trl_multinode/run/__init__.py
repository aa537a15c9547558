"""This rank within its run: `topology`, the run's `store`, the `watchdog` that ends all ranks together, `phases`."""
