"""Weight sync from the trainer's shards to the engines' memory: content (`source`, `peft_source`), gathering
(`shards`), staging memory (`slots`, `transports`), order (`sync`) and verification (`probe`).
"""
