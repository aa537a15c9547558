"""The engines of a node: their processes, the protocol, and the ranks' side of both.

- in a rank: `settings` prepares an engine, `process` owns its process, `node_engines` sends it requests;
- on both sides: `protocol`, `supervisor`, `process_group`, `page_lock`;
- in the engine process: `main` (vLLM) behind `server`;
- in vLLM's own processes: `plugin`, and in its workers `worker` with `receiving` and `reloading`.
"""
