"""A node's engine: its own process, what is said to it, and who owns it.

- in a rank: `settings` prepares, `process` owns, `node_engines` asks;
- on both ends: `protocol`, `supervisor`, `process_group`;
- in the engine process: `main` (vLLM) behind `server`;
- in vLLM's own processes: `plugin`, and in its workers `worker` with `receiving` and `reloading`.
"""
