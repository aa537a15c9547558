"""The engine process: `main` supervises, `server` answers the ranks, `vllm_backend` runs vLLM behind `backend`."""
