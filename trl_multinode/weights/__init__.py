"""From the trainer's shards into the engines' memory: what is sent (`source`, `peft_source`), how it is gathered
(`shards`), where it is handed over (`slots`, `transports`), in which order (`sync`), and the proof (`probe`).
"""
