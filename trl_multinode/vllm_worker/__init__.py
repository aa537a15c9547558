"""Code in vLLM's own processes: `plugin` in each of them, `worker` and `reloading` where the weights are."""
