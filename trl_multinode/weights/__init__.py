"""Weight sync from the trainer's shards to the engines.

`building` chooses the source (`source`, `peft_source`); `names` and `buckets` order its tensors, `shards` gathers
them, `transport` opens the slots, `sync` sends the buckets and `probe` verifies the first update.
"""
